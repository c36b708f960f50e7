//! Names of images: `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]`, with URL escapes (`%26`) in
//! the values.
//!
//! Owns [`RbdName`]. Invariant: none of its parts is empty or has a NUL byte.

use std::ffi::CString;
use std::fmt;
use std::io;
use std::path::Path;

use fjord_block::OpenError;
use percent_encoding::percent_decode_str;

/// The scheme, with its colon.
pub(crate) const PREFIX: &str = "rbd:";
/// The user that Ceph's own programs take.
const USUAL_ID: &str = "admin";

/// What was being done when Ceph refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Reading the cluster's configuration.
    Configuration,
    /// Reaching a monitor, with the user's key.
    Connect,
    /// Finding the pool.
    Pool,
    /// Opening the image.
    Open,
    /// Asking what the image is.
    Look,
    /// Making an image.
    Create,
    /// Removing an image.
    Remove,
    /// Taking the exclusive lock.
    Lock,
}

impl Step {
    fn name(self) -> &'static str {
        match self {
            Step::Configuration => "reading Ceph's configuration",
            Step::Connect => "connecting to the cluster",
            Step::Pool => "opening the pool",
            Step::Open => "opening the image",
            Step::Look => "looking at the image",
            Step::Create => "making the image",
            Step::Remove => "removing the image",
            Step::Lock => "taking the exclusive lock",
        }
    }
}

/// The name of an image, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RbdName {
    /// As it was given.
    whole: String,
    pub(crate) pool: CString,
    pub(crate) namespace: Option<CString>,
    pub(crate) image: CString,
    pub(crate) snapshot: Option<CString>,
    /// The cluster's configuration file; Ceph's default if none is given.
    pub(crate) conf: Option<CString>,
    /// The CephX user, without `client.`.
    pub(crate) id: CString,
}

impl RbdName {
    /// Takes a name apart.
    ///
    /// # Errors
    /// `Remote` (`EINVAL`) for another form.
    pub(crate) fn parse(whole: &str) -> Result<RbdName, OpenError> {
        let wrong = |what: String| {
            let form = "rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE&id=USER]";
            failed(whole, libc::EINVAL, format!("{what}; the form is {form}"))
        };
        let part = |what: &str, text: &str| match text {
            "" => Err(wrong(format!("the name of the {what} is empty"))),
            _ => CString::new(text).map_err(|_| wrong(format!("the name of the {what} has a NUL"))),
        };
        let rest = whole.strip_prefix(PREFIX).unwrap_or(whole);
        let (place, query) = rest.split_once('?').map_or((rest, None), |(a, b)| (a, Some(b)));
        let (path, snapshot) = place.split_once('@').map_or((place, None), |(a, b)| (a, Some(b)));
        let (pool, namespace, image) = match path.split('/').collect::<Vec<_>>()[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            _ => return Err(wrong("the name has one or two slashes".into())),
        };
        let mut name = RbdName {
            whole: whole.into(),
            pool: part("pool", pool)?,
            namespace: namespace.map(|text| part("namespace", text)).transpose()?,
            image: part("image", image)?,
            snapshot: snapshot.map(|text| part("snapshot", text)).transpose()?,
            conf: None,
            id: part("user", USUAL_ID)?,
        };
        for pair in query.into_iter().flat_map(|query| query.split('&')) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode_str(value).decode_utf8_lossy();
            match key {
                "conf" => name.conf = Some(part("configuration file", &value)?),
                "id" => {
                    name.id = part("user", value.strip_prefix("client.").unwrap_or(&value))?;
                }
                _ => return Err(wrong(format!("`{pair}` is neither conf=FILE nor id=USER"))),
            }
        }
        Ok(name)
    }

    /// An error about this image.
    pub(crate) fn failed(&self, errno: i32, what: impl fmt::Display) -> OpenError {
        failed(&self.whole, errno, what.to_string())
    }

    /// The error for what a function of Ceph returned in a step: a negative errno.
    pub(crate) fn refused(&self, step: Step, code: i32) -> OpenError {
        let errno = -code;
        let why = io::Error::from_raw_os_error(errno);
        let advice = match (step, errno) {
            (_, libc::EPERM | libc::EACCES) => {
                "; check the user (`?id=`), its keyring, and that it has `profile rbd` in mon and osd"
            }
            (Step::Configuration, libc::ENOENT) => {
                "; there is no such file: /etc/ceph/ceph.conf is the usual one, give another with `?conf=FILE`"
            }
            (Step::Configuration, libc::EINVAL) => "; the file has not the form of a ceph.conf",
            (Step::Connect, libc::ETIMEDOUT) => {
                "; no monitor answers: check `mon host` in the configuration file, and the network"
            }
            (Step::Connect, libc::ENOENT) => "; the user (`?id=`) has no keyring on this host",
            (Step::Pool, libc::ENOENT) => "; the cluster has no such pool (`ceph osd pool ls`)",
            (Step::Create, libc::ENOENT) => {
                "; the pool has no such namespace (`rbd namespace ls POOL`)"
            }
            (Step::Open, libc::ENOENT) => {
                "; the pool has no such image or snapshot (`rbd ls`, `rbd snap ls`); `fjord mkfs --size` makes an image"
            }
            _ => "",
        };
        self.failed(errno, format!("{}: {why}{advice}", step.name()))
    }

    /// The name as a path, as other images have one.
    pub(crate) fn path(&self) -> &Path {
        Path::new(&self.whole)
    }
}

fn failed(whole: &str, errno: i32, what: String) -> OpenError {
    OpenError::Remote { name: whole.into(), errno, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str) -> Option<[Option<String>; 6]> {
        let name = RbdName::parse(text).ok()?;
        let text = |part: &CString| part.to_string_lossy().into_owned();
        Some([
            Some(text(&name.pool)),
            name.namespace.as_ref().map(text),
            Some(text(&name.image)),
            name.snapshot.as_ref().map(text),
            name.conf.as_ref().map(text),
            Some(text(&name.id)),
        ])
    }

    #[test]
    fn names_come_apart() {
        let wanted = |parts: [&str; 6]| {
            Some(parts.map(|part| Some(part.to_string()).filter(|part| !part.is_empty())))
        };
        for (text, want) in [
            ("rbd:p/i", ["p", "", "i", "", "", "admin"]),
            ("rbd:p/n/i", ["p", "n", "i", "", "", "admin"]),
            ("rbd:p/i@s", ["p", "", "i", "s", "", "admin"]),
            ("rbd:p/n/i@s?conf=/c&id=u", ["p", "n", "i", "s", "/c", "u"]),
            ("rbd:p/i?id=client.u", ["p", "", "i", "", "", "u"]),
            ("rbd:p/i?conf=/a%26b", ["p", "", "i", "", "/a&b", "admin"]),
        ] {
            assert_eq!(parts(text), wanted(want), "{text}");
        }
    }

    #[test]
    fn other_forms_are_refused_by_name() {
        for (text, why) in [
            ("rbd:p", "one or two slashes"),
            ("rbd:a/b/c/d", "one or two slashes"),
            ("rbd:/i", "pool is empty"),
            ("rbd:p/", "image is empty"),
            ("rbd:p/i@", "snapshot is empty"),
            ("rbd:p//i", "namespace is empty"),
            ("rbd:p/i?", "`` is neither"),
            ("rbd:p/i?user=x", "`user=x` is neither"),
            ("rbd:p/i?conf=", "configuration file is empty"),
            ("rbd:p/i\0", "has a NUL"),
        ] {
            let error = RbdName::parse(text).expect_err(text);
            assert!(error.to_string().contains(why), "{text}: {error}");
            assert_eq!(error.errno(), libc::EINVAL);
        }
    }
}
