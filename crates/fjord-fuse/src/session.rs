//! A session on a mounted connection: INIT, the pool of workers, shutdown.
//!
//! Owns the negotiation with the kernel and the worker threads. Invariants: each request gets
//! exactly one reply (or none, where the protocol has none); at each queue one worker is always waiting
//! for a request, or will be at once, with many workers within a few milliseconds (`lane.rs`), unless
//! its share of [`SessionConfig::threads_max`] are busy, so a worker that commits does not delay other
//! requests for long; no more than
//! [`SessionConfig::threads_idle_max`] wait at the device, but for the two of the start; [`Session::run`]
//! returns after every worker has ended and the handler has seen [`Handler::destroy`].

use std::{
    io,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering, fence},
    },
    thread,
    time::Duration,
};

use fjord::awake::{Awake, CPU_DMA_LATENCY, LowLatency};
use fjord_block::lock::{Condvar, Mutex, Rank};
use thiserror::Error;

use crate::{
    abi::*,
    lane::{Growth, Lane},
    reply::Responder,
    request::{self, Op, Request},
    transport::{Channel, Queue, Transport},
};

/// Where the administrator allows FUSE over io_uring.
const ENABLE_URING: &str = "/sys/module/fuse/parameters/enable_uring";
/// How long all workers of a lane may be at work before it is looked at whether they are stuck.
const LOOK: Duration = Duration::from_millis(5);
/// Workers that a ring may have in any case.
const RING_THREADS_LEAST: usize = 4;

/// Parameters that a session requests from the kernel.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Largest payload of one WRITE or READ, in bytes; at most 1 MiB unless the kernel's
    /// `max_pages_limit` was raised.
    pub io_len_max: u32,
    /// INIT flags to use where the kernel has them.
    pub flags: InitFlags,
    /// Most workers at a time at the device; each ring may have its share of as many, but a few in any case.
    pub threads_max: usize,
    /// Workers that may wait for work before further ones end.
    pub threads_idle_max: usize,
    /// Most requests that the kernel may have in flight in the background (readahead, writeback).
    pub background_max: u16,
    /// Keep the processors from halting during a rapid sequence of requests.
    pub low_latency: LowLatency,
    /// When requests come over io_uring.
    pub rings: Rings,
}

/// When requests come over io_uring, if the kernel offers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rings {
    /// Never.
    #[default]
    Never,
    /// From the time on when many callers are the rule: the kernel has no way back, and a single caller is served
    /// faster over /dev/fuse.
    WhenCrowded,
    /// From the beginning.
    Always,
}

impl Default for SessionConfig {
    fn default() -> SessionConfig {
        SessionConfig {
            io_len_max: 1 << 20,
            // Without ASYNC_DIO: after a direct write that completes by itself the kernel would leave
            // older pages in its cache.
            flags: InitFlags::ASYNC_READ
                | InitFlags::BIG_WRITES
                | InitFlags::MAX_PAGES
                | InitFlags::PARALLEL_DIROPS
                | InitFlags::INIT_EXT,
            threads_max: 64,
            threads_idle_max: 4,
            background_max: 64,
            low_latency: LowLatency::Never,
            rings: Rings::Never,
        }
    }
}

/// Parameters negotiated with the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Negotiated {
    /// Minor protocol version in use.
    pub minor: u32,
    /// Flags in effect.
    pub flags: InitFlags,
    /// Largest payload of one WRITE or READ, in bytes.
    pub io_len_max: u32,
}

/// Errors of a session.
#[derive(Debug, Error)]
pub enum SessionError {
    /// The transport failed.
    #[error("the FUSE connection failed: {0}")]
    Io(#[from] io::Error),
    /// The kernel's protocol is too old or too new.
    #[error(
        "the kernel speaks FUSE {major}.{minor}; fjord needs 7.{FUSE_MIN_MINOR_VERSION} or later \
         (Linux 5.4)"
    )]
    Version {
        /// Major version of the kernel.
        major: u32,
        /// Minor version of the kernel.
        minor: u32,
    },
    /// Processors cannot be kept awake.
    #[error("low_latency needs {CPU_DMA_LATENCY} ({0}): mount as root, or omit the option")]
    LowLatency(io::Error),
    /// The connection ended before it began.
    #[error("it was unmounted before the first request")]
    EndedBeforeInit,
}

/// Serves requests; called from many workers at a time.
pub trait Handler: Send + Sync + 'static {
    /// Called once, before the first request, with the negotiated parameters.
    fn init(&self, negotiated: Negotiated);

    /// Serves one request and answers it through `reply`, perhaps later and from another thread
    /// (before [`Handler::destroy`] returns).
    fn handle(&self, request: &Request<'_>, reply: Responder, scratch: &mut Scratch);

    /// The last call, at the unmount. Returns when everything is durable. Called at least once; a
    /// second call does nothing.
    fn destroy(&self);
}

/// Memory that a worker keeps from one request to the next.
#[derive(Debug, Default)]
pub struct Scratch {
    /// For the payload of a READ. Grows to the largest read seen.
    pub read: Vec<u8>,
}

/// A connection with its handler.
pub struct Session<H> {
    shared: Arc<Shared<H>>,
}

struct Shared<H> {
    transport: Arc<dyn Transport>,
    handler: H,
    config: SessionConfig,
    device: Arc<Lane>,
    /// All lanes that have begun.
    lanes: Mutex<Vec<Arc<Lane>>>,
    /// Some lane has to be looked at. Set with a signal of `ended`, by [`Session::run`] taken back.
    looks: AtomicBool,
    /// A channel to each ring, where both sides agreed on rings. Taken by [`Session::run`].
    rings: Mutex<Vec<(Queue, Box<dyn Channel>)>>,
    /// The kernel takes rings, and there are none yet. A flag of its own right: it guards nothing else.
    may_have_rings: AtomicBool,
    /// Set once, by [`Session::init`], where the mount asks for it.
    awake: OnceLock<Awake>,
    /// Workers alive. Guards `ended`.
    workers: Mutex<usize>,
    /// Signalled when the last worker has gone, or `looks` was set.
    ended: Condvar,
}

impl<H: Handler> Session<H> {
    /// A session over a transport that is mounted already.
    pub fn new(transport: Arc<dyn Transport>, handler: H, config: SessionConfig) -> Session<H> {
        let device = Lane::new(Queue::Device, config.threads_max, config.threads_idle_max);
        let shared = Shared {
            transport,
            handler,
            config,
            device: Arc::new(device),
            lanes: Mutex::new(Rank::FuseLanes, Vec::new()),
            looks: AtomicBool::new(false),
            rings: Mutex::new(Rank::FuseRings, Vec::new()),
            may_have_rings: AtomicBool::new(false),
            awake: OnceLock::new(),
            workers: Mutex::new(Rank::FuseWorkers, 0),
            ended: Condvar::new(),
        };
        Session { shared: Arc::new(shared) }
    }

    /// Waits for the kernel's INIT and answers it. Call once, before [`Session::run`].
    ///
    /// # Errors
    /// The transport fails, or the kernel's protocol is not ours.
    pub fn init(&self) -> Result<Negotiated, SessionError> {
        let shared = &self.shared;
        let awake =
            shared.config.low_latency.start(Duration::ZERO).map_err(SessionError::LowLatency)?;
        if let Some(awake) = awake {
            shared.awake.get_or_init(|| awake);
        }
        let mut channel =
            shared.transport.channel(Queue::Device, shared.config.io_len_max as usize)?;
        loop {
            if !channel.receive()? {
                return Err(SessionError::EndedBeforeInit);
            }
            let request = match request::parse(channel.request()) {
                Ok(request) => request,
                Err(e) => {
                    refuse(channel.as_ref(), e.errno());
                    continue;
                }
            };
            let reply = Responder::new(channel.reply_path(), request.header.unique);
            let Op::Init { args } = request.op else {
                reply.error(libc::EIO);
                continue;
            };
            if args.major > FUSE_KERNEL_VERSION {
                // The kernel asks again with our major version.
                reply.value(&InitOut { major: FUSE_KERNEL_VERSION, ..Default::default() });
                continue;
            }
            if args.major < FUSE_KERNEL_VERSION || args.minor < FUSE_MIN_MINOR_VERSION {
                reply.error(libc::EPROTO);
                return Err(SessionError::Version { major: args.major, minor: args.minor });
            }
            let mut negotiated = negotiate(&args, &shared.config);
            self.agree_on_rings(&mut negotiated);
            shared.handler.init(negotiated);
            reply.value(&init_out(&args, &shared.config, negotiated));
            return Ok(negotiated);
        }
    }

    /// Opens the rings before the kernel is told that there will be some: it waits for all of them.
    fn agree_on_rings(&self, negotiated: &mut Negotiated) {
        let shared = &self.shared;
        let is_offered = negotiated.flags.contains(InitFlags::OVER_IO_URING);
        negotiated.flags -= InitFlags::OVER_IO_URING;
        match shared.config.rings {
            Rings::Always if is_offered => match open_rings(shared, negotiated.io_len_max) {
                Ok(rings) => {
                    *shared.rings.lock() = rings;
                    negotiated.flags |= InitFlags::OVER_IO_URING;
                }
                Err(error) => tracing::warn!("no requests over io_uring: {error}"),
            },
            Rings::Always => tracing::warn!(
                "no requests over io_uring: the kernel does not offer it (echo Y > {ENABLE_URING})"
            ),
            Rings::WhenCrowded => shared.may_have_rings.store(is_offered, Ordering::Relaxed),
            Rings::Never => {}
        }
    }

    /// Serves requests until the connection ends.
    ///
    /// # Errors
    /// No worker could be started.
    pub fn run(&self) -> Result<(), SessionError> {
        let shared = &self.shared;
        let rings = std::mem::take(&mut *shared.rings.lock());
        shared.lanes.lock().push(shared.device.clone());
        // Two from the start: one at work, one waiting. With rings there is little to do at the device.
        for _ in 0..if rings.is_empty() { 2 } else { 1 } {
            if shared.device.claim_start() {
                spawn_worker(shared, &shared.device)?;
            }
        }
        start_rings(shared, rings)?;
        let mut workers = self.shared.workers.lock();
        while *workers > 0 {
            if !shared.looks.load(Ordering::Relaxed) {
                shared.ended.wait(&mut workers);
                continue;
            }
            shared.ended.wait_for(&mut workers, LOOK);
            drop(workers);
            look_at_lanes(shared);
            workers = shared.workers.lock();
        }
        drop(workers);
        self.shared.handler.destroy();
        Ok(())
    }

    /// The handler.
    pub fn handler(&self) -> &H {
        &self.shared.handler
    }
}

/// A channel to each ring.
fn open_rings<H>(
    shared: &Shared<H>,
    write_len_max: u32,
) -> io::Result<Vec<(Queue, Box<dyn Channel>)>> {
    let count = shared.transport.ring_count().ok_or(io::ErrorKind::Unsupported)?;
    let open = |number| {
        let queue = Queue::Ring(number);
        Ok((queue, shared.transport.channel(queue, write_len_max as usize)?))
    };
    (0..count).map(open).collect()
}

/// Starts a worker for each ring. Once all have registered, the kernel uses them.
fn start_rings<H: Handler>(
    shared: &Arc<Shared<H>>,
    rings: Vec<(Queue, Box<dyn Channel>)>,
) -> io::Result<()> {
    let threads_max = shared.config.threads_max.checked_div(rings.len()).unwrap_or(0);
    for (queue, channel) in rings {
        let lane = Arc::new(Lane::new(queue, threads_max.max(RING_THREADS_LEAST), 0));
        lane.claim_start();
        shared.lanes.lock().push(lane.clone());
        spawn_with(shared, &lane, channel)?;
    }
    Ok(())
}

/// Goes over to rings if many callers are the rule by now.
fn switch_to_rings<H: Handler>(shared: &Arc<Shared<H>>) {
    if !shared.transport.is_crowded() || !shared.may_have_rings.swap(false, Ordering::Relaxed) {
        return;
    }
    // With more processors than workers most of them would have nothing to do.
    if shared.transport.ring_count().is_none_or(|count| count as usize > shared.config.threads_max)
    {
        return;
    }
    let io_len_max = shared.config.io_len_max;
    match open_rings(shared, io_len_max).and_then(|rings| start_rings(shared, rings)) {
        Ok(()) => tracing::info!("many callers: requests come over io_uring from now on"),
        Err(error) => tracing::info!(%error, "requests stay on /dev/fuse"),
    }
}

/// What both sides can do.
fn negotiate(args: &InitIn, config: &SessionConfig) -> Negotiated {
    let mut offered = u64::from(args.flags);
    if offered & InitFlags::INIT_EXT.bits() != 0 {
        offered |= u64::from(args.flags2) << 32;
    }
    let rings = match config.rings {
        Rings::Never => InitFlags::empty(),
        Rings::WhenCrowded | Rings::Always => InitFlags::OVER_IO_URING,
    };
    let flags = (config.flags | rings) & InitFlags::from_bits_truncate(offered);
    let io_len_max =
        if flags.contains(InitFlags::MAX_PAGES) { config.io_len_max } else { 32 * 4096 };
    Negotiated { minor: args.minor.min(FUSE_KERNEL_MINOR_VERSION), flags, io_len_max }
}

fn init_out(args: &InitIn, config: &SessionConfig, negotiated: Negotiated) -> InitOut {
    let Negotiated { minor, flags, io_len_max } = negotiated;
    InitOut {
        major: FUSE_KERNEL_VERSION,
        minor,
        max_readahead: args.max_readahead.max(io_len_max),
        flags: flags.bits() as u32,
        flags2: (flags.bits() >> 32) as u32,
        max_background: config.background_max,
        congestion_threshold: config.background_max / 4 * 3,
        max_write: io_len_max,
        time_gran: 1,
        max_pages: (io_len_max / 4096) as u16,
        ..Default::default()
    }
}

/// Answers a request that could not be parsed, if it can be told which it was.
fn refuse(channel: &dyn Channel, errno: i32) {
    if let Ok(header) = request::parse_header(channel.request()) {
        let reply = Responder::new(channel.reply_path(), header.unique);
        // These have no reply even when they are malformed.
        match Opcode::from_raw(header.opcode) {
            Some(Opcode::Forget | Opcode::BatchForget) => reply.none(),
            _ => reply.error(errno),
        }
    }
}

/// Starts a worker that its caller has claimed.
fn spawn_worker<H: Handler>(shared: &Arc<Shared<H>>, lane: &Arc<Lane>) -> io::Result<()> {
    match shared.transport.channel(lane.queue, shared.config.io_len_max as usize) {
        Ok(channel) => spawn_with(shared, lane, channel),
        Err(e) => {
            lane.give_up();
            // The connection ended meanwhile: the workers there are find out by themselves.
            if e.raw_os_error() == Some(libc::ENOTCONN) { Ok(()) } else { Err(e) }
        }
    }
}

fn spawn_with<H: Handler>(
    shared: &Arc<Shared<H>>,
    lane: &Arc<Lane>,
    mut channel: Box<dyn Channel>,
) -> io::Result<()> {
    *shared.workers.lock() += 1;
    let (for_thread, lane_of_it) = (Arc::clone(shared), Arc::clone(lane));
    let spawned = thread::Builder::new().name("fjord-fuse".into()).spawn(move || {
        let mut leave = Leave { shared: &for_thread, lane: &lane_of_it, is_orderly: false };
        leave.is_orderly = work(&for_thread, &lane_of_it, channel.as_mut());
    });
    spawned.map(drop).inspect_err(|_| {
        lane.give_up();
        leave(shared);
    })
}

/// Counts a worker out, also when it unwinds.
struct Leave<'a, H> {
    shared: &'a Shared<H>,
    lane: &'a Lane,
    /// The connection has ended, or the worker is one too many.
    is_orderly: bool,
}

impl<H> Drop for Leave<'_, H> {
    fn drop(&mut self) {
        let is_last = self.lane.end() == 0;
        // Requests that nobody would serve fail instead of hanging; over io_uring also the one whose reply was
        // not committed.
        if !self.is_orderly
            && (is_last || self.lane.queue != Queue::Device)
            && let Err(error) = self.shared.transport.abort()
        {
            tracing::error!(%error, "the FUSE connection could not be ended");
        }
        leave(self.shared);
    }
}

fn leave<H>(shared: &Shared<H>) {
    let mut workers = shared.workers.lock();
    *workers -= 1;
    if *workers == 0 {
        shared.ended.notify_all();
    }
}

/// One worker: receive, serve, answer. Enters counted as idle; `false` if it had to end.
fn work<H: Handler>(shared: &Arc<Shared<H>>, lane: &Arc<Lane>, channel: &mut dyn Channel) -> bool {
    let mut scratch = Scratch::default();
    loop {
        let received = channel.receive();
        lane.begin_work();
        match received {
            Ok(true) => {}
            Ok(false) => return true,
            Err(e) => {
                tracing::error!(error = %e, "reading from the FUSE connection failed");
                return false;
            }
        }
        match request::parse(channel.request()) {
            Ok(request) => {
                grow(shared, lane, &request);
                serve(shared, &request, channel, &mut scratch);
            }
            Err(e) => {
                tracing::debug!(error = %e, "refused a FUSE request");
                refuse(channel, e.errno());
            }
        }
        if !channel.is_settled() {
            lane.waiting(|| channel.settle());
        }
        if shared.may_have_rings.load(Ordering::Relaxed) {
            switch_to_rings(shared);
        }
        if !lane.may_rest() {
            return true;
        }
    }
}

/// Starts a further worker if the one that has this request was the last that waited, or has [`Session::run`] look
/// whether one is needed.
fn grow<H: Handler>(shared: &Arc<Shared<H>>, lane: &Arc<Lane>, request: &Request<'_>) {
    if matches!(request.op, Op::Forget { .. } | Op::BatchForget { .. }) {
        return;
    }
    match lane.grow() {
        Growth::None => {}
        Growth::Now => start_further(shared, lane),
        Growth::Later => {
            fence(Ordering::SeqCst);
            if !shared.looks.swap(true, Ordering::SeqCst) {
                let _workers = shared.workers.lock();
                shared.ended.notify_all();
            }
        }
    }
}

fn start_further<H: Handler>(shared: &Arc<Shared<H>>, lane: &Arc<Lane>) {
    if let Err(e) = spawn_worker(shared, lane) {
        tracing::warn!(error = %e, "no further FUSE worker could be started");
    }
}

/// Starts a worker for each lane whose workers are all at work for some time, until none is short of workers.
fn look_at_lanes<H: Handler>(shared: &Arc<Shared<H>>) {
    let lanes = shared.lanes.lock().clone();
    // Taken back before the look: who finds a lane short after it asks again.
    shared.looks.store(false, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    if lanes.iter().any(|lane| lane.is_short()) {
        shared.looks.store(true, Ordering::SeqCst);
    }
    for lane in lanes.iter().filter(|lane| lane.claim_start_if_stuck()) {
        start_further(shared, lane);
    }
}

fn serve<H: Handler>(
    shared: &Shared<H>,
    request: &Request<'_>,
    channel: &dyn Channel,
    scratch: &mut Scratch,
) {
    if let Some(awake) = shared.awake.get() {
        awake.count();
    }
    let reply = Responder::new(channel.reply_path(), request.header.unique);
    match request.op {
        // Every operation runs to its end, so there is nothing to interrupt; ENOSYS tells the
        // kernel not to ask again.
        Op::Interrupt(_) => reply.error(libc::ENOSYS),
        Op::Destroy => {
            shared.handler.destroy();
            reply.empty();
        }
        Op::Init { .. } => reply.error(libc::EIO),
        Op::Unserved(Opcode::NotifyReply) => reply.none(),
        Op::Unserved(_) => reply.error(libc::ENOSYS),
        _ => shared.handler.handle(request, reply, scratch),
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc::{self, Receiver, Sender};

    use zerocopy::IntoBytes;

    use super::*;
    use crate::transport::ReplyPath;

    /// A connection whose requests are numbers, and whose further channels take long to open.
    struct Slow {
        requests: Arc<parking_lot::Mutex<Receiver<u64>>>,
        replies: Sender<u64>,
        opened: AtomicUsize,
        is_opening: AtomicBool,
        opened_together: AtomicBool,
        /// The opening of a third channel ends.
        opens: parking_lot::Mutex<Receiver<()>>,
    }

    struct SlowChannel {
        requests: Arc<parking_lot::Mutex<Receiver<u64>>>,
        replies: Sender<u64>,
        request: InHeader,
    }

    impl Transport for Slow {
        fn channel(&self, _: Queue, _: usize) -> io::Result<Box<dyn Channel>> {
            if self.opened.fetch_add(1, Ordering::SeqCst) >= 2 {
                if self.is_opening.swap(true, Ordering::SeqCst) {
                    self.opened_together.store(true, Ordering::SeqCst);
                } else {
                    self.replies.send(OPENING).unwrap();
                    self.opens.lock().recv().unwrap();
                    self.is_opening.store(false, Ordering::SeqCst);
                }
            }
            let (requests, replies) = (self.requests.clone(), self.replies.clone());
            Ok(Box::new(SlowChannel { requests, replies, request: InHeader::default() }))
        }

        fn ring_count(&self) -> Option<u16> {
            None
        }

        fn is_crowded(&self) -> bool {
            false
        }

        fn abort(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Channel for SlowChannel {
        fn receive(&mut self) -> io::Result<bool> {
            let Ok(unique) = self.requests.lock().recv() else { return Ok(false) };
            let len = size_of::<InHeader>() as u32;
            let opcode = Opcode::Statfs as u32;
            self.request = InHeader { len, opcode, unique, ..Default::default() };
            Ok(true)
        }

        fn request(&self) -> &[u8] {
            self.request.as_bytes()
        }

        fn reply_path(&self) -> Arc<dyn ReplyPath> {
            Arc::new(SlowPath(self.replies.clone()))
        }
    }

    struct SlowPath(Sender<u64>);

    impl ReplyPath for SlowPath {
        fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()> {
            let header: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            // Where the test has failed nobody listens.
            let _ = self.0.send(u64::from_ne_bytes(header[8..16].try_into().unwrap()));
            Ok(())
        }

        fn notify(&self, _: &[IoSlice<'_>]) -> io::Result<()> {
            Ok(())
        }
    }

    /// Told instead of a reply when a third channel is being opened.
    const OPENING: u64 = 1000;
    /// Requests up to this one are answered when the test says so.
    const HELD_MAX: u64 = 2;

    struct Holds(parking_lot::Mutex<Receiver<()>>);

    impl Handler for Holds {
        fn init(&self, _: Negotiated) {}

        fn handle(&self, request: &Request<'_>, reply: Responder, _: &mut Scratch) {
            if request.header.unique <= HELD_MAX {
                self.0.lock().recv().unwrap();
            }
            reply.empty();
        }

        fn destroy(&self) {}
    }

    /// Failed once under load: workers that were started at the same time stayed, all of them idle.
    #[test]
    fn one_worker_is_started_at_a_time() {
        let (request, requests) = mpsc::channel();
        let (replies, replied) = mpsc::channel();
        let (open, opens) = mpsc::channel();
        let (release, held) = mpsc::channel();
        let slow = Arc::new(Slow {
            requests: Arc::new(parking_lot::Mutex::new(requests)),
            replies,
            opened: AtomicUsize::new(0),
            is_opening: AtomicBool::new(false),
            opened_together: AtomicBool::new(false),
            opens: parking_lot::Mutex::new(opens),
        });
        let handler = Holds(parking_lot::Mutex::new(held));
        let session = Session::new(slow.clone(), handler, SessionConfig::default());
        let shared = session.shared.clone();
        let server = thread::spawn(move || session.run().unwrap());
        // Before that the first of them would start another.
        while *shared.workers.lock() < 2 {
            thread::yield_now();
        }
        // Both workers are busy: the one that sees that starts a third before it answers.
        request.send(1).unwrap();
        request.send(2).unwrap();
        assert_eq!(replied.recv(), Ok(OPENING));
        release.send(()).unwrap();
        let first = replied.recv().unwrap();
        assert!(first <= HELD_MAX, "{first}");
        // Only its worker is there for these; the third one is on its way.
        for unique in 3..9 {
            request.send(unique).unwrap();
            assert_eq!(replied.recv(), Ok(unique));
        }
        open.send(()).unwrap();
        release.send(()).unwrap();
        assert_eq!(replied.recv(), Ok(1 + HELD_MAX - first));
        assert!(!slow.opened_together.load(Ordering::SeqCst));
        assert_eq!(slow.opened.load(Ordering::SeqCst), 3);
        drop(request);
        server.join().unwrap();
    }

    #[test]
    fn only_offered_flags_are_used() {
        let config = SessionConfig {
            flags: InitFlags::MAX_PAGES | InitFlags::POSIX_ACL | InitFlags::DIRECT_IO_ALLOW_MMAP,
            ..Default::default()
        };
        let flags2 = (InitFlags::DIRECT_IO_ALLOW_MMAP.bits() >> 32) as u32;
        let mut args = InitIn {
            major: 7,
            minor: 99,
            flags: InitFlags::MAX_PAGES.bits() as u32,
            flags2,
            ..Default::default()
        };
        let agreed = negotiate(&args, &config);
        let out = init_out(&args, &config, agreed);
        assert_eq!(agreed.flags, InitFlags::MAX_PAGES, "flags2 counts only with INIT_EXT");
        assert_eq!((out.max_pages, out.minor), (256, FUSE_KERNEL_MINOR_VERSION));
        args.flags = InitFlags::INIT_EXT.bits() as u32;
        let out = init_out(&args, &config, negotiate(&args, &config));
        assert_eq!((out.flags, out.flags2), (0, flags2));
        assert_eq!(out.max_write, 32 * 4096);
    }
}
