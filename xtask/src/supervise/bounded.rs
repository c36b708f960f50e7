//! Calls that may wait for a FUSE server which does not answer, or for a process that waits for one.
//!
//! Owns the threads that make such calls, and which of them did not return. Invariant: the caller waits for
//! [`PATIENCE`] at most, once for each question; a thread that waits longer ends with the supervisor.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

/// How long an answer may take on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(2);

/// Questions without an answer, which are not asked again.
static UNANSWERED: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// The answer to `question`, which names what `ask` looks at; `None` if it does not come in time.
pub(super) fn ask<T: Send + 'static>(
    question: &str,
    ask: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let unanswered = || UNANSWERED.lock().unwrap_or_else(PoisonError::into_inner);
    if unanswered().as_ref().is_some_and(|questions| questions.contains(question)) {
        return None;
    }
    let (sender, receiver) = mpsc::channel();
    // Nobody may wait for the answer any more.
    let run = move || drop(sender.send(ask()));
    let started = thread::Builder::new().name("ask".into()).spawn(run);
    let answer = started.ok().and_then(|_| receiver.recv_timeout(PATIENCE).ok());
    if answer.is_none() {
        unanswered().get_or_insert_default().insert(question.to_owned());
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_question_without_an_answer_is_asked_once() {
        let (hold, held) = mpsc::channel::<()>();
        assert_eq!(ask("answers", || 7), Some(7));
        assert_eq!(ask("hangs", move || held.recv().is_ok()), None);
        assert_eq!(ask("hangs", || true), None);
        drop(hold);
        assert_eq!(ask("answers", || 8), Some(8));
    }
}
