//! Log of a daemon's warnings and errors: syslog, or the kernel's log (dmesg) if no syslog listens.
//!
//! Owns the delivery of messages. Invariants: sending never blocks, because the reader of the
//! socket may itself wait for the mount that the message is about; no connection is kept, so that
//! messages reach a restarted syslog.

use std::{
    fmt::{self, Write as _},
    fs::File,
    io::{self, Write as _},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tracing::{Event, Level, Subscriber, field};
use tracing_subscriber::layer::{Context, Layer};

/// The socket, unless the environment variable names another.
const SOCKET: &str = "/dev/log";
const VARIABLE: &str = "FJORD_SYSLOG";
/// The facility `daemon`, shifted.
const FACILITY: u8 = 3 << 3;
/// Longer messages are cut: a record of the kernel's log has about as much room.
const MESSAGE_BYTES_MAX: usize = 900;

/// What this process serves; set in a daemon.
static SERVED: OnceLock<String> = OnceLock::new();

/// From now on warnings and errors go to syslog, with the image and the mount point.
pub(crate) fn start(source: impl fmt::Display, dir: &Path) {
    // A process serves one image in its life.
    let _ = SERVED.set(format!("{source} on {}", dir.display()));
    std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
}

/// The `tracing` layer that sends them.
pub(crate) struct Syslog;

impl<S: Subscriber> Layer<S> for Syslog {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(served) = SERVED.get() else { return };
        let severity = match *event.metadata().level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            _ => return,
        };
        let mut text = Text::default();
        event.record(&mut text);
        let Text { mut message, fields } = text;
        message += &fields;
        // One line per message, without control characters.
        let line: String = message.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        send(severity, &format!("{served}: {line}"));
    }
}

/// The message of an event, and its other fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl field::Visit for Text {
    fn record_debug(&mut self, field: &field::Field, value: &dyn fmt::Debug) {
        // Writing into a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

/// Sends one message; failures are ignored.
fn send(severity: u8, message: &str) {
    let end = message.len().min(MESSAGE_BYTES_MAX);
    let end = (0..=end).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
    // The receiver adds the time.
    let (priority, pid) = (FACILITY | severity, std::process::id());
    let mut record = format!("<{priority}>fjord[{pid}]: {}", &message[..end]);
    if to_socket(record.as_bytes()).is_err() {
        // Without it the kernel waits for the rest of the line.
        record.push('\n');
        let _ = to_kernel(record.as_bytes());
    }
}

fn to_socket(record: &[u8]) -> io::Result<()> {
    let path = std::env::var_os(VARIABLE).map_or_else(|| SOCKET.into(), PathBuf::from);
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.send_to(record, path).map(drop)
}

fn to_kernel(record: &[u8]) -> io::Result<()> {
    File::options().write(true).open("/dev/kmsg")?.write_all(record)
}
