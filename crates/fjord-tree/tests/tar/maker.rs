//! Makes tar streams by hand, those among them that no program makes.

/// Bytes of a block.
pub(crate) const BLOCK: usize = 512;

/// Which program the header looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Old,
    Ustar,
    Gnu,
    Star,
}

/// One entry, or an extension of one.
#[derive(Clone, Debug)]
pub(crate) struct Member {
    pub(crate) style: Style,
    pub(crate) path: Vec<u8>,
    pub(crate) prefix: Vec<u8>,
    pub(crate) flag: u8,
    pub(crate) mode: u32,
    pub(crate) ids: (u32, u32),
    pub(crate) names: (Vec<u8>, Vec<u8>),
    pub(crate) mtime: i64,
    pub(crate) link: Vec<u8>,
    pub(crate) device: (u32, u32),
    pub(crate) data: Vec<u8>,
    /// What the header states, when it is not the length of the data.
    pub(crate) stated: Option<u64>,
    /// Records of an extended header before the entry.
    pub(crate) records: Vec<(Vec<u8>, Vec<u8>)>,
    /// Bytes that are put into the header at an offset.
    pub(crate) patches: Vec<(usize, Vec<u8>)>,
}

impl Member {
    pub(crate) fn new(flag: u8, path: &str) -> Member {
        Member {
            style: Style::Ustar,
            path: path.into(),
            prefix: Vec::new(),
            flag,
            mode: if flag == b'5' { 0o755 } else { 0o644 },
            ids: (0, 0),
            names: (Vec::new(), Vec::new()),
            mtime: 1_700_000_000,
            link: Vec::new(),
            device: (0, 0),
            data: Vec::new(),
            stated: None,
            records: Vec::new(),
            patches: Vec::new(),
        }
    }

    pub(crate) fn file(path: &str, data: &[u8]) -> Member {
        Member { data: data.to_vec(), ..Member::new(b'0', path) }
    }

    pub(crate) fn directory(path: &str) -> Member {
        Member::new(b'5', path)
    }

    pub(crate) fn symlink(path: &str, target: &str) -> Member {
        Member { link: target.into(), ..Member::new(b'2', path) }
    }

    pub(crate) fn hard_link(path: &str, target: &str) -> Member {
        Member { link: target.into(), ..Member::new(b'1', path) }
    }

    /// An extended header with these records, on its own.
    pub(crate) fn extended(flag: u8, records: &[(&str, &[u8])]) -> Member {
        let data = records.iter().flat_map(|(key, value)| record(key.as_bytes(), value)).collect();
        Member { data, ..Member::new(flag, "extended") }
    }

    pub(crate) fn record(mut self, key: &str, value: impl AsRef<[u8]>) -> Member {
        self.records.push((key.into(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn mode(self, mode: u32) -> Member {
        Member { mode, ..self }
    }

    pub(crate) fn style(self, style: Style) -> Member {
        Member { style, ..self }
    }

    pub(crate) fn patch(mut self, at: usize, bytes: &[u8]) -> Member {
        self.patches.push((at, bytes.to_vec()));
        self
    }

    /// The entry with its extended header, in whole blocks.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if !self.records.is_empty() {
            let data: Vec<u8> =
                self.records.iter().flat_map(|(key, value)| record(key, value)).collect();
            bytes = Member { data, ..Member::new(b'x', "extended") }.bytes();
        }
        bytes.extend(self.header());
        bytes.extend(&self.data);
        bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
        bytes
    }

    fn header(&self) -> [u8; BLOCK] {
        let mut header = [0; BLOCK];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.path[..self.path.len().min(100)]);
        put(100, format!("{:07o}\0", self.mode).as_bytes());
        put(108, &number(self.ids.0.into(), 8));
        put(116, &number(self.ids.1.into(), 8));
        put(124, &number(self.stated.unwrap_or(self.data.len() as u64) as i64, 12));
        put(136, &number(self.mtime, 12));
        put(156, &[self.flag]);
        put(157, &self.link[..self.link.len().min(100)]);
        match self.style {
            Style::Old => {}
            Style::Ustar | Style::Star => put(257, b"ustar\x0000"),
            Style::Gnu => put(257, b"ustar  \0"),
        }
        if self.style != Style::Old {
            put(265, &self.names.0);
            put(297, &self.names.1);
            put(329, &number(self.device.0.into(), 8));
            put(337, &number(self.device.1.into(), 8));
            put(345, &self.prefix);
        }
        if self.style == Style::Star {
            put(508, b"tar\0");
        }
        for (at, bytes) in &self.patches {
            put(*at, bytes);
        }
        seal(&mut header);
        header
    }
}

/// Gives a header the checksum that fits it.
pub(crate) fn seal(header: &mut [u8]) {
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// An octal field, or a binary one where that is too short.
pub(crate) fn number(value: i64, len: usize) -> Vec<u8> {
    let octal_max = 8i64.pow(len as u32 - 1);
    if (0..octal_max).contains(&value) {
        return format!("{value:0width$o}\0", width = len - 1).into_bytes();
    }
    let fill = if value < 0 { 0xff } else { 0 };
    let mut bytes = vec![fill; len.saturating_sub(8)];
    bytes.extend(&value.to_be_bytes()[8usize.saturating_sub(len)..]);
    bytes[0] |= 0x80;
    bytes
}

/// A record of an extended header.
pub(crate) fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    // The length counts its own digits.
    let mut len = rest + 1;
    while rest + len.to_string().len() != len {
        len = rest + len.to_string().len();
    }
    [format!("{len} ").as_bytes(), key, b"=", value, b"\n"].concat()
}

/// A stream of these, with its end mark.
pub(crate) fn stream(members: &[Member]) -> Vec<u8> {
    let mut bytes = without_end(members);
    bytes.extend([0; 2 * BLOCK]);
    bytes
}

/// A stream of these, without its end mark.
pub(crate) fn without_end(members: &[Member]) -> Vec<u8> {
    members.iter().flat_map(Member::bytes).collect()
}
