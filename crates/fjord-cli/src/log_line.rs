//! Lines of the log on standard error: level, image, message.
//!
//! Invariant: a line that is about the image names it; the engine, which may have no name for its device, need not.

use std::{fmt, path::Path};

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::{
    fmt::{
        FmtContext,
        format::{FormatEvent, FormatFields, Writer},
    },
    registry::LookupSpan,
};

/// The form of a line.
pub(crate) struct LogLine {
    image: Option<String>,
}

impl LogLine {
    pub(crate) fn of(image: Option<&Path>) -> LogLine {
        LogLine { image: image.map(|image| image.display().to_string()) }
    }
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let level = event.metadata().level();
        let (on, off) = match (writer.has_ansi_escapes(), *level) {
            (false, _) => ("", ""),
            (true, Level::ERROR) => ("\x1b[31m", "\x1b[0m"),
            (true, Level::WARN) => ("\x1b[33m", "\x1b[0m"),
            (true, _) => ("\x1b[2m", "\x1b[0m"),
        };
        write!(writer, "{on}{level:>5}{off} ")?;
        let mut text = String::new();
        ctx.field_format().format_fields(Writer::new(&mut text), event)?;
        if let Some(image) = self.image.as_deref().filter(|image| !text.contains(image)) {
            write!(writer, "{image}: ")?;
        }
        writeln!(writer, "{text}")
    }
}
