//! Compressed streams: recognised by their first bytes, read to their end.
//!
//! Owns the limits of the decoders. Invariants: a stream that is cut off, damaged, or followed by
//! other bytes is an error, never a short result; no frame or block makes a decoder keep more
//! than [`WINDOW_BYTES_MAX`] of what it has decoded.
//!
//! Formats: RFC 1952 (gzip: members follow each other, zeros may follow the last), RFC 8878
//! (Zstandard: frames, skippable ones between them), the .xz file format (streams, padding between
//! them).

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read, Seek};

use flate2::bufread::GzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::FrameDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use thiserror::Error;

/// Most bytes of decoded data that a decoder keeps to refer back to: what `zstd --ultra -22` and
/// twice what `xz -9` ask for.
pub(crate) const WINDOW_BYTES_MAX: u64 = 128 << 20;
/// Memory of the xz decoder besides its dictionary, in KiB.
const XZ_BESIDE_KIB: u32 = 1024;
const BUFFER_BYTES: usize = 64 << 10;
/// Bytes that tell a format.
const MAGIC_BYTES: usize = 6;

/// A format of compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952.
    Gzip,
    /// RFC 8878.
    Zstd,
    /// The .xz format.
    Xz,
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
            Compression::Xz => "xz",
        })
    }
}

/// Errors of compressed streams.
#[derive(Debug, Error)]
pub enum CompressError {
    /// It ends before its end mark.
    #[error("the {0} stream ends early; was it cut off?")]
    Cut(Compression),
    /// Its bytes contradict the format or their checksum.
    #[error("the {format} stream is damaged: {detail}")]
    Damaged {
        /// Its format.
        format: Compression,
        /// What the decoder says.
        detail: String,
    },
    /// Bytes that are no compressed data follow its end.
    #[error("other data follow the end of the {0} stream; remove them, or decompress it by hand")]
    Trailing(Compression),
    /// It refers back further than is kept in memory.
    #[error(
        "the {0} stream needs a window of more than {max} MiB; decompress it by hand ({0} \
         -dc{flag}), or compress it with a smaller one",
        max = WINDOW_BYTES_MAX >> 20,
        flag = if *.0 == Compression::Zstd { " --long=31" } else { "" }
    )]
    Window(Compression),
    /// It needs a dictionary that is not part of it.
    #[error("the zstd stream needs dictionary {0}; decompress it by hand (zstd -dc -D DICTIONARY)")]
    Dictionary(u32),
}

impl From<CompressError> for io::Error {
    fn from(error: CompressError) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, error)
    }
}

/// The bytes of a stream, unpacked.
pub(crate) enum Plain<'a> {
    /// A file that is not compressed: what is not wanted is passed over without reading it.
    File {
        reader: BufReader<&'a File>,
        /// Bytes from where the reader is to the end of the file.
        left: u64,
    },
    Stream(Box<dyn Read + 'a>),
}

impl<'a> Plain<'a> {
    /// Reads a stream, compressed or not.
    pub(crate) fn of_stream(mut stream: impl Read + 'a) -> io::Result<Plain<'a>> {
        let mut magic = Vec::with_capacity(MAGIC_BYTES);
        stream.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut magic)?;
        let format = recognise(&magic);
        let whole = Cursor::new(magic).chain(stream);
        let source = BufReader::with_capacity(BUFFER_BYTES, whole);
        Ok(Plain::Stream(unpack(format, source)))
    }

    /// Reads a file from where it is, compressed or not.
    pub(crate) fn of_file(mut file: &'a File) -> io::Result<Plain<'a>> {
        let start = file.stream_position()?;
        let mut magic = Vec::with_capacity(MAGIC_BYTES);
        file.take(MAGIC_BYTES as u64).read_to_end(&mut magic)?;
        file.seek(io::SeekFrom::Start(start))?;
        let reader = BufReader::with_capacity(BUFFER_BYTES, file);
        if let Some(format) = recognise(&magic) {
            return Ok(Plain::Stream(unpack(Some(format), reader)));
        }
        let end = file.seek(io::SeekFrom::End(0))?;
        file.seek(io::SeekFrom::Start(start))?;
        Ok(Plain::File { reader, left: end.saturating_sub(start) })
    }

    /// Passes over `count` bytes; fewer at the end. Gives how many.
    pub(crate) fn skip(&mut self, count: u64) -> io::Result<u64> {
        match self {
            Plain::File { reader, left } => {
                let count = count.min(*left);
                let way = i64::try_from(count).map_err(|_| io::ErrorKind::InvalidInput)?;
                reader.seek_relative(way)?;
                *left -= count;
                Ok(count)
            }
            Plain::Stream(stream) => io::copy(&mut stream.take(count), &mut io::sink()),
        }
    }
}

impl Read for Plain<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Plain::File { reader, left } => {
                let count = reader.read(buf)?;
                *left = left.saturating_sub(count as u64);
                Ok(count)
            }
            Plain::Stream(stream) => stream.read(buf),
        }
    }
}

const GZIP_MAGIC: &[u8] = &[0x1f, 0x8b];
const ZSTD_MAGIC: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// Magic of skippable frames, whose first byte is 0x50 to 0x5f.
const ZSTD_SKIPPABLE_MAGIC: &[u8] = &[0x2a, 0x4d, 0x18];
const XZ_MAGIC: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];

fn recognise(magic: &[u8]) -> Option<Compression> {
    let skippable = magic.first().is_some_and(|byte| byte & 0xf0 == 0x50)
        && magic[1..].starts_with(ZSTD_SKIPPABLE_MAGIC);
    if magic.starts_with(GZIP_MAGIC) {
        Some(Compression::Gzip)
    } else if magic.starts_with(ZSTD_MAGIC) || skippable {
        Some(Compression::Zstd)
    } else if magic.starts_with(XZ_MAGIC) {
        Some(Compression::Xz)
    } else {
        None
    }
}

/// What a stream that is no tar stream seems to be, by its first bytes, and how to unpack it.
pub(crate) fn seems_to_be(start: &[u8]) -> Option<(&'static str, &'static str)> {
    const OTHERS: &[(&[u8], &str, &str)] = &[
        (b"BZh", "compressed with bzip2", "bzip2 -dc"),
        (b"LZIP", "compressed with lzip", "lzip -dc"),
        (&[0x04, 0x22, 0x4d, 0x18], "compressed with lz4", "lz4 -dc"),
        (&[0x1f, 0x9d], "compressed with compress", "uncompress -c"),
        (&[0x89, b'L', b'Z', b'O'], "compressed with lzop", "lzop -dc"),
        (&[0x5d, 0, 0], "compressed with lzma", "xz -dc"),
        (GZIP_MAGIC, "compressed twice", "gzip -dc"),
        (ZSTD_MAGIC, "compressed twice", "zstd -dc"),
        (XZ_MAGIC, "compressed twice", "xz -dc"),
    ];
    let found = OTHERS.iter().find(|(magic, ..)| start.starts_with(magic));
    found.map(|(_, what, how)| (*what, *how))
}

fn unpack<'a>(format: Option<Compression>, source: impl BufRead + 'a) -> Box<dyn Read + 'a> {
    match format {
        None => Box::new(source),
        Some(Compression::Gzip) => Box::new(GzipMembers(Some(GzDecoder::new(source)))),
        Some(Compression::Zstd) => Box::new(ZstdFrames::new(source)),
        Some(Compression::Xz) => Box::new(XzStreams(Some(XzStreams::open(source)))),
    }
}

/// Whether this error, or one that it wraps, is a failed read of what lies below a decoder.
fn is_of_source(error: &io::Error) -> bool {
    error.raw_os_error().is_some()
}

/// The members of a gzip stream, one after the other.
struct GzipMembers<R>(Option<GzDecoder<R>>);

impl<R: BufRead> GzipMembers<R> {
    /// The decoder of the next member; none at the end.
    fn next(mut source: R) -> io::Result<Option<GzDecoder<R>>> {
        let start = source.fill_buf()?;
        match start.first() {
            None => Ok(None),
            Some(0x1f) => Ok(Some(GzDecoder::new(source))),
            // Tapes and some programs pad with zeros.
            Some(0) => loop {
                let zeros = source.fill_buf()?;
                let count = zeros.len();
                if count == 0 {
                    return Ok(None);
                }
                if zeros.iter().any(|byte| *byte != 0) {
                    return Err(CompressError::Trailing(Compression::Gzip).into());
                }
                source.consume(count);
            },
            Some(_) => Err(CompressError::Trailing(Compression::Gzip).into()),
        }
    }
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        const FORMAT: Compression = Compression::Gzip;
        while !buf.is_empty() {
            let Some(member) = &mut self.0 else { break };
            match member.read(buf) {
                Ok(0) => {
                    let Some(member) = self.0.take() else { break };
                    self.0 = GzipMembers::next(member.into_inner())?;
                }
                Ok(count) => return Ok(count),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(CompressError::Cut(FORMAT).into());
                }
                Err(error) if is_of_source(&error) => return Err(error),
                Err(error) => {
                    let detail = error.to_string();
                    return Err(CompressError::Damaged { format: FORMAT, detail }.into());
                }
            }
        }
        Ok(0)
    }
}

/// The frames of a Zstandard stream, one after the other.
struct ZstdFrames<R> {
    source: R,
    decoder: FrameDecoder,
    in_frame: bool,
    /// Bytes that the frame has given.
    given: u64,
}

fn zstd_damaged(detail: impl ToString) -> CompressError {
    CompressError::Damaged { format: Compression::Zstd, detail: detail.to_string() }
}

/// The error of a read that a decoder's error wraps, if any.
fn io_source<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e io::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return Some(io);
        }
        next = error.source();
    }
    None
}

fn zstd_error(error: FrameDecoderError) -> io::Error {
    let of_read = io_source(&error);
    match (&error, of_read) {
        (FrameDecoderError::WindowSizeTooBig { .. }, _) => {
            CompressError::Window(Compression::Zstd).into()
        }
        (FrameDecoderError::DictNotProvided { dict_id }, _) => {
            CompressError::Dictionary(*dict_id).into()
        }
        (_, Some(io)) if io.kind() == io::ErrorKind::UnexpectedEof => {
            CompressError::Cut(Compression::Zstd).into()
        }
        (_, Some(io)) if is_of_source(io) => {
            io::Error::from_raw_os_error(io.raw_os_error().unwrap_or_default())
        }
        _ => zstd_damaged(error).into(),
    }
}

impl<R: BufRead> ZstdFrames<R> {
    fn new(source: R) -> ZstdFrames<R> {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_BYTES_MAX);
        ZstdFrames { source, decoder, in_frame: false, given: 0 }
    }

    /// Reads the header of the next frame that holds data; false at the end.
    fn next_frame(&mut self) -> io::Result<bool> {
        loop {
            if self.source.fill_buf()?.is_empty() {
                return Ok(false);
            }
            match self.decoder.init(&mut self.source) {
                Ok(()) => {
                    (self.in_frame, self.given) = (true, 0);
                    return Ok(true);
                }
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    let length = u64::from(length);
                    let mut rest = self.source.by_ref().take(length);
                    if io::copy(&mut rest, &mut io::sink())? < length {
                        return Err(CompressError::Cut(Compression::Zstd).into());
                    }
                }
                Err(FrameDecoderError::ReadFrameHeaderError(
                    ReadFrameHeaderError::BadMagicNumber(_),
                )) => return Err(CompressError::Trailing(Compression::Zstd).into()),
                // Less than a magic number.
                Err(FrameDecoderError::ReadFrameHeaderError(
                    ReadFrameHeaderError::MagicNumberReadError(error),
                )) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(CompressError::Trailing(Compression::Zstd).into());
                }
                Err(error) => return Err(zstd_error(error)),
            }
        }
    }

    fn end_frame(&mut self) -> io::Result<()> {
        self.in_frame = false;
        // A header that tells no size gives 0.
        let told = self.decoder.content_size();
        if told != 0 && told != self.given {
            return Err(zstd_damaged("a frame is not as long as its header says").into());
        }
        let stored = self.decoder.get_checksum_from_data();
        if stored.is_some() && stored != self.decoder.get_calculated_checksum() {
            return Err(zstd_damaged("a frame has a wrong checksum").into());
        }
        Ok(())
    }
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            let count = self.decoder.read(buf)?;
            if count > 0 {
                self.given = self.given.saturating_add(count as u64);
                return Ok(count);
            }
            if self.decoder.is_finished() {
                self.end_frame()?;
                continue;
            }
            // One at a time: what is decoded and not yet read stays below a window and a block.
            let one = ruzstd::decoding::BlockDecodingStrategy::UptoBlocks(1);
            self.decoder.decode_blocks(&mut self.source, one).map_err(zstd_error)?;
        }
    }
}

/// The streams of an .xz file, one after the other.
struct XzStreams<R: Read>(Option<XzReader<R>>);

impl<R: BufRead> XzStreams<R> {
    fn open(source: R) -> XzReader<R> {
        let limit_kib = (WINDOW_BYTES_MAX >> 10) as u32 + XZ_BESIDE_KIB;
        XzReader::new_mem_limit(source, false, limit_kib)
    }

    /// The reader of the next stream, after padding of whole words; none at the end.
    fn next(mut source: R) -> io::Result<Option<XzReader<R>>> {
        let mut padding: u64 = 0;
        loop {
            let bytes = source.fill_buf()?;
            let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
            let next = bytes.get(zeros).copied();
            let at_end = bytes.is_empty();
            source.consume(zeros);
            padding += zeros as u64;
            let aligned = padding.is_multiple_of(4);
            match next {
                None if at_end && aligned => return Ok(None),
                None if !at_end => {}
                Some(byte) if aligned && byte == XZ_MAGIC[0] => {
                    return Ok(Some(XzStreams::open(source)));
                }
                _ => return Err(CompressError::Trailing(Compression::Xz).into()),
            }
        }
    }
}

impl<R: BufRead> Read for XzStreams<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        const FORMAT: Compression = Compression::Xz;
        while !buf.is_empty() {
            let Some(stream) = &mut self.0 else { break };
            match stream.read(buf) {
                Ok(0) => {
                    let Some(stream) = self.0.take() else { break };
                    self.0 = XzStreams::next(stream.into_inner())?;
                }
                Ok(count) => return Ok(count),
                Err(error) if is_of_source(&error) => return Err(error),
                Err(error) => {
                    let detail = error.to_string();
                    let error = match error.kind() {
                        io::ErrorKind::UnexpectedEof => CompressError::Cut(FORMAT),
                        io::ErrorKind::OutOfMemory => CompressError::Window(FORMAT),
                        _ => CompressError::Damaged { format: FORMAT, detail },
                    };
                    return Err(error.into());
                }
            }
        }
        Ok(0)
    }
}
