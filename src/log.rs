//! The log: one event a line on stderr, which must never block, end or stop PID 1.

use std::cell::{Cell, RefCell};
use std::fmt::{self, Display, Write};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::stat::fstat;

use crate::init::write::write_now;

/// A line has at most this many bytes, `PIPE_BUF`: a pipe takes it whole or not at all.
const LONGEST_LINE: usize = 4096;

/// How grave an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something is wrong, and an operator should change it.
    Error,
    /// Something may be wrong.
    Warn,
    /// What an operator wants to know of every stop.
    Info,
    /// What explains the rest.
    Debug,
}

impl Level {
    /// All levels by their names.
    pub const NAMES: [(&'static str, Level); 4] =
        [("error", Level::Error), ("warn", Level::Warn), ("info", Level::Info), ("debug", Level::Debug)];
}

/// How a line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `TIME LEVEL message key=value …`
    Text,
    /// One JSON object a line, with the same keys.
    Json,
}

impl Format {
    /// All formats by their names.
    pub const NAMES: [(&'static str, Format); 2] = [("text", Format::Text), ("json", Format::Json)];
}

/// A field: its key and its value.
pub type Field<'a> = (&'a str, &'a dyn Display);

/// The keys whose values are numbers, in JSON too.
const NUMBERS: [&str; 13] = [
    "connections",
    "count",
    "holders",
    "lines_dropped",
    "listeners",
    "pid",
    "run",
    "sender",
    "sockets",
    "status",
    "uid",
    "tries_left",
    "undelivered",
];

/// Writes events.
#[derive(Debug)]
pub struct Log {
    level: Level,
    format: Format,
    /// The stderr of the container's main process, for a hook, whose own stderr no one sees.
    second: RefCell<Option<File>>,
    /// Lines that could not be written since the last one that could.
    dropped: Cell<u64>,
}

impl Log {
    /// A log on stderr.
    #[must_use]
    pub fn new(format: Format, level: Level) -> Log {
        Log { level, format, second: RefCell::new(None), dropped: Cell::new(0) }
    }

    /// Writes every further line to the stderr of process `pid` as well, unless that is this one's own.
    ///
    /// # Errors
    /// Where that may not be opened: it belongs to another user, is a socket, or has no reader.
    pub fn also_to(&self, pid: i32) -> io::Result<()> {
        let path = format!("/proc/{pid}/fd/2");
        // An open file of our own, so that not to block is ours alone too.
        let file = OpenOptions::new()
            .append(true)
            .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
            .open(path)?;
        let of = |file: &dyn AsFd| fstat(file.as_fd()).map(|stat| (stat.st_dev, stat.st_ino));
        if of(&file).is_ok_and(|there| Ok(there) == of(&io::stderr())) {
            return Ok(());
        }
        *self.second.borrow_mut() = Some(file);
        Ok(())
    }

    /// An error that an operator should act on.
    pub fn error(&self, message: &str, fields: &[Field]) {
        self.event(Level::Error, message, fields);
    }

    /// A warning.
    pub fn warn(&self, message: &str, fields: &[Field]) {
        self.event(Level::Warn, message, fields);
    }

    /// An event of every stop.
    pub fn info(&self, message: &str, fields: &[Field]) {
        self.event(Level::Info, message, fields);
    }

    /// A detail.
    pub fn debug(&self, message: &str, fields: &[Field]) {
        self.event(Level::Debug, message, fields);
    }

    fn event(&self, level: Level, message: &str, fields: &[Field]) {
        if level > self.level {
            return;
        }
        let dropped = self.dropped.get();
        let mut fields = fields.to_vec();
        if dropped > 0 {
            fields.push(("lines_dropped", &dropped));
        }
        let line = render(self.format, SystemTime::now(), level, message, &fields);
        if self.write(&line) {
            self.dropped.set(0);
        } else {
            self.dropped.set(dropped.saturating_add(1));
        }
    }

    /// One line for a person, as it is: what is wrong with the arguments.
    pub fn plain(&self, line: &str) {
        let mut line = line.replace('\n', " ");
        line.push('\n');
        self.write(&line);
    }

    fn write(&self, line: &str) -> bool {
        if let Some(file) = &*self.second.borrow() {
            // Where it fails, stderr has the line.
            let _ = write_now(file.as_fd(), line.as_bytes());
        }
        write_now(io::stderr().as_fd(), line.as_bytes()).is_ok()
    }
}

fn render(format: Format, time: SystemTime, level: Level, message: &str, fields: &[Field]) -> String {
    let mut line = String::with_capacity(256);
    let level = Level::NAMES.iter().find(|(_, known)| *known == level).map_or("", |(name, _)| name);
    // Writing to a String cannot fail.
    let _ = match format {
        Format::Text => text(&mut line, time, level, message, fields),
        Format::Json => json(&mut line, time, level, message, fields),
    };
    line
}

/// Whether a field still fits, with room for the mark that says which one did not.
fn fits(line: &str, key: &str, value: &str) -> bool {
    [line.len(), key.len(), value.len(), 64].into_iter().fold(0, usize::saturating_add) < LONGEST_LINE
}

fn text(line: &mut String, time: SystemTime, level: &str, message: &str, fields: &[Field]) -> fmt::Result {
    write!(line, "{} {} {message}", Rfc3339(time), level.to_ascii_uppercase())?;
    for (key, value) in fields {
        let value = value.to_string();
        let bare = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '=' | '\\');
        let value = if !value.is_empty() && value.chars().all(bare) { value } else { format!("{value:?}") };
        if !fits(line, key, &value) {
            write!(line, " cut={key}")?;
            break;
        }
        write!(line, " {key}={value}")?;
    }
    writeln!(line)
}

fn json(line: &mut String, time: SystemTime, level: &str, message: &str, fields: &[Field]) -> fmt::Result {
    write!(line, "{{\"time\":\"{}\",\"level\":\"{level}\",\"message\":\"{}\"", Rfc3339(time), Json(message))?;
    for (key, value) in fields {
        let value = value.to_string();
        let value = if NUMBERS.contains(key) { value } else { format!("\"{}\"", Json(&value)) };
        if !fits(line, key, &value) {
            write!(line, ",\"cut\":\"{key}\"")?;
            break;
        }
        write!(line, ",\"{key}\":{value}")?;
    }
    writeln!(line, "}}")
}

/// A string with what JSON wants escaped (RFC 8259, section 7).
pub struct Json<'a>(pub &'a str);

impl Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '"' | '\\' => write!(f, "\\{c}")?,
                c if c < ' ' || c == '\x7f' => write!(f, "\\u{:04x}", u32::from(c))?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A duration to the millisecond: `3.214s`.
#[derive(Clone, Copy, Debug)]
pub struct Seconds(pub Duration);

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, milli) = (self.0.as_secs(), self.0.subsec_millis());
        if milli == 0 { write!(f, "{whole}s") } else { write!(f, "{whole}.{milli:03}s") }
    }
}

/// A time in UTC, with milliseconds.
struct Rfc3339(SystemTime);

impl Display for Rfc3339 {
    /// The date from the days since 1970 (Howard Hinnant, "chrono-compatible low-level date algorithms",
    /// `civil_from_days`, for days that are not negative).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let second = since.as_secs();
        let days = (second / 86_400).wrapping_add(719_468);
        let era = days / 146_097;
        let day_of_era = days % 146_097;
        let year_of_era = day_of_era
            .wrapping_sub(day_of_era / 1_460)
            .wrapping_add(day_of_era / 36_524)
            .wrapping_sub(day_of_era / 146_096)
            / 365;
        let leap_days = (year_of_era / 4).wrapping_sub(year_of_era / 100);
        let day_of_year = day_of_era.wrapping_sub(year_of_era.wrapping_mul(365).wrapping_add(leap_days));
        let shifted_month = day_of_year.wrapping_mul(5).wrapping_add(2) / 153;
        let day =
            day_of_year.wrapping_sub(shifted_month.wrapping_mul(153).wrapping_add(2) / 5).wrapping_add(1);
        let month =
            if shifted_month < 10 { shifted_month.wrapping_add(3) } else { shifted_month.wrapping_sub(9) };
        let year = year_of_era.wrapping_add(era.wrapping_mul(400)).wrapping_add(u64::from(month <= 2));
        let (hour, minute) = (second / 3_600 % 24, second / 60 % 60);
        let (second, milli) = (second % 60, since.subsec_millis());
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(format: Format, message: &str, fields: &[Field]) -> String {
        let time = UNIX_EPOCH + Duration::from_millis(1_785_542_400_123);
        render(format, time, Level::Info, message, fields)
    }

    #[test]
    fn text_quotes_what_would_be_read_as_more_than_a_value() {
        let fields: [Field; 4] = [("a", &"plain"), ("b", &"two words\n"), ("c", &""), ("count", &7)];
        assert_eq!(
            line(Format::Text, "hold started", &fields),
            "2026-08-01T00:00:00.123Z INFO hold started a=plain b=\"two words\\n\" c=\"\" count=7\n"
        );
    }

    #[test]
    fn json_is_json_with_the_same_keys() {
        let fields: [Field; 3] = [("a", &"q\"\\\n\u{1b}é"), ("count", &7), ("c", &"")];
        let line = line(Format::Json, "hold \"x\"", &fields);
        let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            parsed,
            serde_json::json!({
                "time": "2026-08-01T00:00:00.123Z", "level": "info", "message": "hold \"x\"",
                "a": "q\"\\\n\u{1b}é", "count": 7, "c": ""
            })
        );
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
    }

    #[test]
    fn a_line_always_fits_a_pipe_and_says_what_was_cut() {
        let long = "x\u{1}".repeat(3_000);
        for format in [Format::Text, Format::Json] {
            let line = line(format, "m", &[("a", &1), ("long", &long), ("b", &2)]);
            assert!(line.len() <= LONGEST_LINE && line.contains("cut"), "{line}");
            assert!(!line.contains("\"b\""));
        }
    }

    #[test]
    fn dates_agree_with_another_calendar() {
        for days in (0..200_000).step_by(101) {
            let second = days * 86_400 + days % 86_400;
            let ours = Rfc3339(UNIX_EPOCH + Duration::from_secs(second)).to_string();
            let theirs = jiff::Timestamp::from_second(second.cast_signed()).unwrap();
            assert_eq!(ours, format!("{theirs:.3}"));
        }
    }
}
