//! Panics of the engine under test: findings, not the end of the explorer.
//!
//! Owns the text of the last one.

use std::any::Any;
use std::panic::{self, AssertUnwindSafe};

use anyhow::{Result, anyhow};
use parking_lot::Mutex;

/// Message and place of the last panic, once [`keep_quiet`] was called. A leaf lock.
static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Keeps panics from being printed; what they say goes into the finding.
pub fn keep_quiet() {
    panic::set_hook(Box::new(|info| *LAST.lock() = Some(info.to_string())));
}

/// Runs what may panic.
pub(crate) fn catch<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    panic::catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|payload| Err(told("engine", &*payload)))
}

/// A panic of somebody as an error.
pub(crate) fn told(who: &str, payload: &(dyn Any + Send)) -> anyhow::Error {
    let plain = || {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("without a word")
            .to_owned()
    };
    let text = LAST.lock().take().unwrap_or_else(plain);
    anyhow!("the {who} panicked: {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_says_what_it_said() {
        let error = catch::<()>(|| panic!("block {} is gone", 7)).unwrap_err();
        assert!(error.to_string().contains("block 7 is gone"), "{error}");
    }
}
