//! How fsyncs were served: by the policy, or by a commit of everything.

use std::collections::BTreeMap;

use fjord::FsyncStats;
use serde::Serialize;

/// How fsyncs were served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Served {
    /// Nothing had changed.
    pub nothing: u64,
    /// Data in place and a flush.
    pub data: u64,
    /// By the policy.
    pub policy: u64,
    /// By a commit of everything, by reason.
    pub fallbacks: BTreeMap<String, u64>,
}

impl Served {
    /// All calls.
    pub fn call_count(&self) -> u64 {
        self.nothing + self.data + self.policy + self.fallback_count()
    }

    /// Calls that committed everything.
    pub fn fallback_count(&self) -> u64 {
        self.fallbacks.values().sum()
    }

    pub(crate) fn add(&mut self, other: &Served) {
        self.nothing += other.nothing;
        self.data += other.data;
        self.policy += other.policy;
        for (reason, count) in &other.fallbacks {
            *self.fallbacks.entry(reason.clone()).or_default() += count;
        }
    }

    /// What has come since `before`.
    pub(crate) fn since(&self, before: &Served) -> Served {
        let reasons = self.fallbacks.iter().map(|(reason, count)| {
            let earlier = before.fallbacks.get(reason).copied().unwrap_or(0);
            (reason.clone(), count.saturating_sub(earlier))
        });
        Served {
            nothing: self.nothing.saturating_sub(before.nothing),
            data: self.data.saturating_sub(before.data),
            policy: self.policy.saturating_sub(before.policy),
            fallbacks: reasons.filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// The counters of an open image.
    pub(crate) fn of(stats: &FsyncStats) -> Served {
        let reasons = stats.fallbacks.iter();
        Served {
            nothing: stats.nothing,
            data: stats.data,
            policy: stats.policy,
            fallbacks: reasons.map(|(why, count)| (why.name().into(), *count)).collect(),
        }
    }

    /// The counters of a mount as `fjord stats --json` tells them.
    pub(crate) fn from_json(text: &str) -> Option<Served> {
        let value: serde_json::Value = serde_json::from_str(text).ok()?;
        let fsync = value.get("fsync")?;
        let number = |name: &str| fsync.get(name)?.as_u64();
        let reasons = fsync.get("fallbacks")?.as_object()?.iter();
        let fallbacks = reasons.map(|(reason, count)| Some((reason.clone(), count.as_u64()?)));
        Some(Served {
            nothing: number("nothing")?,
            data: number("data")?,
            policy: number("policy")?,
            fallbacks: fallbacks.collect::<Option<_>>()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_and_subtracted() {
        let text = |policy: u32, reasons: &str| {
            format!(
                r#"{{"fsync":{{"nothing":1,"data":2,"policy":{policy},"fallbacks":{{{reasons}}}}},"other":0}}"#
            )
        };
        let before = Served::from_json(&text(3, r#""rename":1"#)).unwrap();
        let after = Served::from_json(&text(9, r#""rename":1,"hard-link":4"#)).unwrap();
        let since = after.since(&before);
        assert_eq!((since.policy, since.call_count(), since.fallback_count()), (6, 10, 4));
        assert_eq!(since.fallbacks.keys().collect::<Vec<_>>(), ["hard-link"]);
        for wrong in ["", "{}", r#"{"fsync":{"nothing":1}}"#, &text(1, r#""rename":"x""#)] {
            assert_eq!(Served::from_json(wrong), None, "{wrong}");
        }
    }
}
