//! Changes of permission bits as chmod(1) takes them: octal, or symbolic such as `u+rwX,go-w`.
//!
//! Semantics: GNU coreutils, "Symbolic Modes" and "Numeric Modes"; directories keep their set-user-ID
//! and set-group-ID bits unless they are mentioned.

/// All bits that can be changed.
const ALL: u16 = 0o7777;
const SET_IDS: u16 = 0o6000;
const EXECUTE: u16 = 0o111;

/// What a change takes its bits from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Bits,
    /// The rights that these bits have in the mode before.
    Copied,
    /// Also execute, of a directory or where anybody has it.
    ExecuteIfAny,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    /// `+`, `-` or `=`.
    op: u8,
    source: Source,
    /// Whose bits change; none where nobody is named, so that the umask decides.
    affected: u16,
    value: u16,
    /// Bits that are meant even of a directory.
    mentioned: u16,
}

/// A change of permission bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ModeChange(Vec<Step>);

impl ModeChange {
    pub(crate) fn parse(text: &str) -> Result<ModeChange, String> {
        let wrong =
            || format!("{text:?} is no mode: write octal digits, such as 644, or u+rwX,go-w");
        if text.starts_with(|first: char| first.is_ascii_digit()) {
            let value = octal(text.as_bytes()).ok_or_else(wrong)?;
            let mentioned = if text.len() < 5 { value & ALL & !0o777 | 0o777 } else { ALL };
            let step = Step { op: b'=', source: Source::Bits, affected: ALL, value, mentioned };
            return Ok(ModeChange(vec![step]));
        }
        let clauses = text.split(',').map(|clause| clause_steps(clause.as_bytes()));
        let steps: Option<Vec<Vec<Step>>> = clauses.collect();
        Ok(ModeChange(steps.ok_or_else(wrong)?.concat()))
    }

    /// The permission bits that those of `mode` become.
    pub(crate) fn apply(&self, mode: u16, is_dir: bool, umask: u16) -> u16 {
        self.0.iter().fold(mode & ALL, |mode, step| step.apply(mode, is_dir, umask))
    }
}

/// The steps of a clause, such as `ug=r+w`.
fn clause_steps(clause: &[u8]) -> Option<Vec<Step>> {
    let who_len = clause.iter().take_while(|byte| b"ugoa".contains(byte)).count();
    let (who, mut rest) = clause.split_at(who_len);
    let affected = who.iter().fold(0, |bits, byte| {
        bits | match byte {
            b'u' => 0o4700,
            b'g' => 0o2070,
            b'o' => 0o1007,
            _ => ALL,
        }
    });
    let mut steps = Vec::new();
    while let Some((&op, after)) = rest.split_first() {
        if !b"+-=".contains(&op) {
            return None;
        }
        let end = after.iter().position(|byte| b"+-=".contains(byte)).unwrap_or(after.len());
        let (what, others) = after.split_at(end);
        rest = others;
        if what.first().is_some_and(u8::is_ascii_digit) {
            // Such as +111: all bits are meant, and nobody can be named.
            let value = octal(what).filter(|_| who.is_empty() && rest.is_empty())?;
            steps.push(Step { op, source: Source::Bits, affected: ALL, value, mentioned: ALL });
            continue;
        }
        let (source, value) = rights(what)?;
        let mentioned = if affected == 0 { value } else { affected & value };
        steps.push(Step { op, source, affected, value, mentioned });
    }
    (!steps.is_empty()).then_some(steps)
}

/// Permission bits in octal digits.
fn octal(digits: &[u8]) -> Option<u16> {
    let text = std::str::from_utf8(digits).ok().filter(|text| !text.starts_with('+'))?;
    u16::from_str_radix(text, 8).ok().filter(|value| *value <= ALL)
}

/// What stands behind an operator.
fn rights(what: &[u8]) -> Option<(Source, u16)> {
    match what {
        b"u" => return Some((Source::Copied, 0o700)),
        b"g" => return Some((Source::Copied, 0o070)),
        b"o" => return Some((Source::Copied, 0o007)),
        _ => {}
    }
    let (mut source, mut value) = (Source::Bits, 0);
    for byte in what {
        match byte {
            b'r' => value |= 0o444,
            b'w' => value |= 0o222,
            b'x' => value |= EXECUTE,
            b'X' => source = Source::ExecuteIfAny,
            b's' => value |= SET_IDS,
            b't' => value |= 0o1000,
            _ => return None,
        }
    }
    Some((source, value))
}

impl Step {
    fn apply(&self, mode: u16, is_dir: bool, umask: u16) -> u16 {
        let left_alone = if is_dir { SET_IDS & !self.mentioned } else { 0 };
        let mut value = self.value;
        match self.source {
            Source::Bits => {}
            Source::Copied => {
                value &= mode;
                for all in [0o444, 0o222, EXECUTE] {
                    value |= if value & all == 0 { 0 } else { all };
                }
            }
            Source::ExecuteIfAny if is_dir || mode & EXECUTE != 0 => value |= EXECUTE,
            Source::ExecuteIfAny => {}
        }
        value &= if self.affected == 0 { !umask } else { self.affected };
        value &= !left_alone;
        match self.op {
            b'+' => mode | value,
            b'-' => mode & !value,
            _ => {
                let kept = if self.affected == 0 { 0 } else { !self.affected } | left_alone;
                mode & kept | value
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_those_of_chmod() {
        for (text, before, is_dir, after) in [
            ("644", 0o4755, false, 0o644),
            ("755", 0o6700, true, 0o6755),
            ("00755", 0o6700, true, 0o755),
            ("4711", 0o2700, true, 0o6711),
            ("u+x", 0o644, false, 0o744),
            ("+x", 0o600, false, 0o711),
            ("+w", 0o400, false, 0o600),
            ("go-rwx", 0o777, false, 0o700),
            ("a=r", 0o4777, false, 0o444),
            ("=", 0o777, false, 0),
            ("u=rwx,go=rX", 0o600, true, 0o755),
            ("u=rwX,go=rX", 0o600, false, 0o644),
            ("a+X", 0o744, false, 0o755),
            ("g=u", 0o640, false, 0o660),
            ("o=g-w", 0o660, false, 0o664),
            ("u+s,g+s", 0o755, false, 0o6755),
            ("ug-s", 0o6755, true, 0o755),
            ("g=rx", 0o2770, true, 0o2750),
            ("g=rx", 0o2770, false, 0o750),
            ("+t", 0o777, true, 0o1777),
            ("o-t", 0o1777, true, 0o777),
            ("+111", 0o600, false, 0o711),
            ("=755", 0o6700, true, 0o755),
            ("u-x,-022", 0o777, false, 0o655),
        ] {
            let change = ModeChange::parse(text).expect(text);
            let found = change.apply(before, is_dir, 0o022);
            assert_eq!(found, after, "{text} of {before:o}: {found:o}");
        }
        for wrong in [
            "", "8", "99", "77777", "u", "rwx", "u+q", "u+x,", "x+u", "+ug", "u+1", "+8", "+1x",
            "+1+2",
        ] {
            assert!(ModeChange::parse(wrong).is_err(), "{wrong}");
        }
    }
}
