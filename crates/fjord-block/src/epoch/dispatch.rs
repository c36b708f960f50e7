//! From ready requests to commands: order, scheduling discipline, merging and splitting.
//!
//! Owns no state of its own. [`EpochQueue::choices`]: the commands that order allows;
//! [`EpochQueue::choose`]: the discipline's choice among them, within the shares of the classes.

use super::queue::{Entry, EpochQueue, InFlight};
use super::rules::Rules;
use super::types::{Choice, Command, CommandId, IoKind, Part, RequestId};
use crate::device::{Class, Order};

const CLASSES: [Class; 3] = [Class::Sync, Class::Async, Class::Background];
/// Pieces start at multiples of this many bytes, so that no two share a page.
const PIECE_ALIGN_BYTES: u64 = 4096;

/// A command under construction.
struct Draft {
    offset: u64,
    len: u64,
    parts: Vec<Part>,
}

impl<R: Rules> EpochQueue<R> {
    /// All commands that order allows now, regardless of the discipline.
    pub fn choices(&self) -> Vec<Choice> {
        let mut choices = Vec::new();
        if self.flush_class().is_some() {
            choices.push(Choice::Flush);
        }
        choices.extend(CLASSES.into_iter().flat_map(|c| self.ready.all(c)).map(Choice::Request));
        choices
    }

    /// The highest class that a new flush would serve. It does not wait for flushes in flight for
    /// lower classes.
    fn flush_class(&self) -> Option<Class> {
        if !self.traits.volatile_cache || self.failures.has_flush() {
            return None;
        }
        let wanting = self.flushes.unserved().chain(self.epoch_flush_request());
        let class = wanting.filter_map(|id| Some(self.requests.get(&id)?.class)).min()?;
        let before = self.flushes.in_flight.iter().filter(|(.., other)| *other <= class).count();
        (before < self.tuning.flush_depth as usize).then_some(class)
    }

    /// Whether a flush should precede requests below class Sync, to make space for them in the
    /// device's cache.
    fn wants_room(&self, now_ns: u64) -> bool {
        self.failure().is_none()
            && (!self.ready.is_empty(Class::Background) || !self.ready.is_empty(Class::Async))
            && self.share.wants_flush(now_ns, &self.tuning)
            && self.flushes.in_flight.len() < self.tuning.flush_depth as usize
    }

    /// The discipline's next choice; None if the queue is empty or the device has enough commands.
    pub fn choose(&self, now_ns: u64) -> Option<Choice> {
        if self.share.in_flight_total() >= self.traits.queue_depth {
            return None;
        }
        let flush_class = self.flush_class();
        let overdue = self.most_overdue(now_ns);
        if overdue.is_some() && !self.overdue_left_last {
            return overdue;
        }
        for class in CLASSES {
            if flush_class == Some(class) {
                return Some(Choice::Flush);
            }
            if class != Class::Sync && self.wants_room(now_ns) {
                return Some(Choice::Flush);
            }
            if self.ready.is_empty(class) || !self.share.allows(class, now_ns, &self.tuning) {
                continue;
            }
            let deadline_ns = self.tuning.deadline_ns[class as usize];
            let id = self.ready.next(class, now_ns, deadline_ns);
            return id.map(Choice::Request);
        }
        overdue
    }

    /// The most overdue candidate below class Sync: the oldest ready request of a class, unless one
    /// of its class is in flight, or the flush that a request or the next epoch waits for. Their
    /// dependencies are older and of no lower class, so they had their turn before.
    fn most_overdue(&self, now_ns: u64) -> Option<Choice> {
        let late_ns = |class: Class, pushed_ns: u64| {
            let limit_ns = self.tuning.starvation_ns[class as usize];
            now_ns.saturating_sub(pushed_ns).checked_sub(limit_ns)
        };
        let requests = [Class::Async, Class::Background].into_iter().filter_map(|class| {
            let (pushed_ns, id) = self.ready.oldest(class)?;
            let late_ns = late_ns(class, pushed_ns)?;
            (self.share.in_flight_of(class) == 0).then_some((late_ns, Choice::Request(id)))
        });
        let flushes = self.flush_class().into_iter().flat_map(|_| {
            let waiting = self.flushes.unserved().chain(self.epoch_flush_request());
            let waiting = waiting.filter_map(|id| self.requests.get(&id));
            waiting.filter_map(|entry| late_ns(entry.class, entry.pushed_ns))
        });
        let flush = flushes.max().map(|late_ns| (late_ns, Choice::Flush));
        requests.chain(flush).max_by_key(|(late_ns, _)| *late_ns).map(|(_, choice)| choice)
    }

    /// The next command for the device.
    pub fn next_dispatch(&mut self, now_ns: u64) -> Option<Command> {
        let choice = self.choose(now_ns)?;
        self.dispatch(choice, now_ns)
    }

    /// Dispatches one of [`EpochQueue::choices`], or a flush of the scheduler itself. None if the
    /// choice is not among them.
    pub fn dispatch(&mut self, choice: Choice, now_ns: u64) -> Option<Command> {
        self.overdue_left_last = self.most_overdue(now_ns) == Some(choice);
        match choice {
            Choice::Flush => Some(self.send_flush(now_ns)),
            Choice::Request(id) => self.send_request(id, now_ns),
        }
    }

    fn new_command(&mut self) -> CommandId {
        let id = CommandId(self.next_command);
        self.next_command += 1;
        self.stats.command_count += 1;
        self.stats.in_flight_count += 1;
        self.stats.in_flight_count_max =
            self.stats.in_flight_count_max.max(self.stats.in_flight_count);
        id
    }

    fn send_flush(&mut self, now_ns: u64) -> Command {
        let class = self.flush_class();
        let id = self.new_command();
        self.stats.flush_count += 1;
        if class.is_none() {
            self.stats.background_flush_count += 1;
        }
        let class = class.unwrap_or(Class::Background);
        self.stats.combined_flush_count += self.flushes.begin(id, class).saturating_sub(1);
        self.share.begin_flush(id);
        let in_flight = InFlight {
            kind: IoKind::Flush,
            class,
            requests: Vec::new(),
            len: 0,
            sent_ns: now_ns,
            bounded: false,
        };
        self.commands.insert(id, in_flight);
        Command { id, kind: IoKind::Flush, offset: 0, len: 0, class, parts: Vec::new() }
    }

    fn send_request(&mut self, id: RequestId, now_ns: u64) -> Option<Command> {
        let place = self.place(id)?;
        if !self.ready.remove(place) {
            return None;
        }
        let entry = self.requests.get(&id)?;
        let (class, kind) = (entry.class, entry.io.kind);
        let fua = self.passed_fua(kind);
        let left_bytes = entry.io.len - entry.sent;
        let take_bytes = left_bytes.min(self.piece_bytes(entry, now_ns));
        let part = Part { request: id, skip: entry.sent, len: take_bytes };
        let mut draft = Draft { offset: place.offset, len: take_bytes, parts: vec![part] };
        if matches!(kind, IoKind::Write { .. }) && take_bytes == left_bytes {
            let bytes_max = self.tuning.merge_bytes_max.min(self.piece_bytes_max(class, now_ns));
            self.merge(&mut draft, class, fua, bytes_max);
        }
        Some(self.send_draft(draft, kind, class, fua, now_ns))
    }

    /// Most bytes of a request in one command.
    fn piece_bytes(&self, entry: &Entry, now_ns: u64) -> u64 {
        let splits = matches!(entry.io.kind, IoKind::Write { .. })
            && (entry.io.offset + entry.sent).is_multiple_of(PIECE_ALIGN_BYTES);
        if splits { self.piece_bytes_max(entry.class, now_ns) } else { u64::MAX }
    }

    fn piece_bytes_max(&self, class: Class, now_ns: u64) -> u64 {
        let bounded = self.share.bounds(class, now_ns);
        if bounded || class == Class::Background {
            self.share.piece_bytes(now_ns, &self.tuning)
        } else {
            u64::MAX
        }
    }

    fn passed_fua(&self, kind: IoKind) -> bool {
        match kind {
            IoKind::Write { order, fua: true } => self.rules.passes_fua(&self.traits, order),
            _ => false,
        }
    }

    /// Merges ready writes adjacent to the draft, of the same class and with the same FUA.
    fn merge(&mut self, draft: &mut Draft, class: Class, fua: bool, bytes_max: u64) {
        let end = |draft: &Draft| draft.offset.checked_add(draft.len);
        while let Some(id) = end(draft).and_then(|end| self.ready.write_at(end)) {
            let Some(part) = self.merge_one(id, draft, class, fua, bytes_max) else { break };
            draft.parts.push(part);
        }
        while let Some(id) = self.ready.write_below(draft.offset) {
            let ends_here = self.requests.get(&id).is_some_and(|entry| {
                entry.io.offset.checked_add(entry.io.len) == Some(draft.offset)
            });
            let part = ends_here.then(|| self.merge_one(id, draft, class, fua, bytes_max));
            let Some(part) = part.flatten() else { break };
            draft.offset -= part.len;
            draft.parts.insert(0, part);
        }
    }

    /// Takes an adjacent request out of the ready ones if it may be merged; adds its length to the
    /// draft.
    fn merge_one(
        &mut self,
        id: RequestId,
        draft: &mut Draft,
        class: Class,
        fua: bool,
        bytes_max: u64,
    ) -> Option<Part> {
        let entry = self.requests.get(&id)?;
        let len = entry.io.len - entry.sent;
        let fits = entry.class == class
            && self.passed_fua(entry.io.kind) == fua
            && draft.len.checked_add(len).is_some_and(|sum| sum <= bytes_max);
        let part = Part { request: id, skip: entry.sent, len };
        let place = self.place(id)?;
        if !fits || !self.ready.remove(place) {
            return None;
        }
        draft.len += len;
        self.stats.merged_count += 1;
        Some(part)
    }

    /// Marks the draft's parts as dispatched and builds the command, with its order.
    fn send_draft(
        &mut self,
        draft: Draft,
        kind: IoKind,
        class: Class,
        fua: bool,
        now_ns: u64,
    ) -> Command {
        let (mut asked, mut last) = (Order::Orderless, false);
        for part in &draft.parts {
            let Some(entry) = self.requests.get_mut(&part.request) else { continue };
            entry.in_flight += 1;
            entry.sent += part.len;
            let whole = entry.sent == entry.io.len;
            let (order, epoch) = (entry.io.kind.order(), entry.epoch);
            asked = stronger(asked, order);
            if whole {
                self.leave(part.request);
                let state = epoch.and_then(|epoch| self.epoch_mut(epoch));
                last |= state.is_some_and(|state| state.closed && state.queued_count == 0);
            } else {
                self.stats.split_count += 1;
                if let Some(place) = self.place(part.request) {
                    self.ready.insert(place);
                }
            }
        }
        let kind = match kind {
            IoKind::Write { .. } => {
                let order = self.rules.leaves_as(asked, last);
                self.stats.reassigned_count +=
                    u64::from(order == Order::Barrier && asked != Order::Barrier);
                IoKind::Write { order, fua }
            }
            other => other,
        };
        let id = self.new_command();
        self.ready.set_head(class, draft.offset.saturating_add(draft.len));
        let requests = draft.parts.iter().map(|part| part.request).collect();
        let bounded = self.share.bounds(class, now_ns);
        let in_flight =
            InFlight { kind, class, requests, len: draft.len, sent_ns: now_ns, bounded };
        self.share.begin(&in_flight);
        self.commands.insert(id, in_flight);
        // An epoch may end as soon as its last write is dispatched.
        self.settle();
        Command { id, kind, offset: draft.offset, len: draft.len, class, parts: draft.parts }
    }

    /// A command in flight that has to end before this request can: a waiter of the request can
    /// drive it. None if there is none, as for a request that only waits to be dispatched: a waiter
    /// that drove some other command might sleep long after its own request is done.
    pub fn waits_for(&self, id: RequestId) -> Option<CommandId> {
        let mut at = id;
        loop {
            let entry = self.requests.get(&at)?;
            if entry.in_flight > 0 {
                return self.command_of(at);
            }
            if entry.left {
                let time = self.flushes.time_of(at)?;
                return self.flushes.awaited(time, entry.class, self.tuning.flush_depth);
            }
            if self.is_free(entry) {
                return None;
            }
            // Every step leads to an earlier request.
            let before = match (entry.io.kind, entry.blockers.first()) {
                (IoKind::Flush, _) => self.ordered.first().copied(),
                (_, Some(blocker)) => Some(*blocker),
                (_, None) => self.ordered.iter().copied().find(|id| self.keeps_epochs_out(*id)),
            };
            match before.filter(|before| *before < at) {
                Some(before) => at = before,
                None => return self.epoch_flush(),
            }
        }
    }

    /// Whether later epochs wait for this ordered write: until it is dispatched, or transferred.
    fn keeps_epochs_out(&self, id: RequestId) -> bool {
        let has_left = self.requests.get(&id).is_some_and(|entry| entry.left);
        !has_left || !self.traits.native_barrier
    }

    fn command_of(&self, id: RequestId) -> Option<CommandId> {
        let has = |in_flight: &InFlight| in_flight.requests.contains(&id);
        self.commands.iter().find(|(_, in_flight)| has(in_flight)).map(|(command, _)| *command)
    }
}

fn stronger(a: Order, b: Order) -> Order {
    match (a, b) {
        (Order::Barrier, _) | (_, Order::Barrier) => Order::Barrier,
        (Order::Ordered, _) | (_, Order::Ordered) => Order::Ordered,
        _ => Order::Orderless,
    }
}
