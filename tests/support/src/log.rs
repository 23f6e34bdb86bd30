//! What all containers of a Pod wrote, line by line with the time of arrival.

use std::io::{BufRead, BufReader, Read};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// One line of a container's or a hook's output.
#[derive(Clone, Debug)]
pub struct Line {
    pub at: Instant,
    /// `sidecar`, `application`, or what `exec` was called with, such as `hook`.
    pub source: String,
    pub text: String,
}

/// The lines of one Pod, in the order of their arrival.
#[derive(Debug)]
pub struct Log {
    started: Instant,
    lines: Mutex<Vec<Line>>,
    grown: Condvar,
}

impl Log {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { started: Instant::now(), lines: Mutex::default(), grown: Condvar::new() })
    }

    /// Reads `from` to its end in a thread of its own.
    pub(crate) fn drain(self: &Arc<Self>, source: &str, from: impl Read + Send + 'static) -> JoinHandle<()> {
        let (log, source) = (Arc::clone(self), source.to_owned());
        thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut bytes = Vec::new();
            while matches!(from.read_until(b'\n', &mut bytes), Ok(n) if n > 0) {
                let text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
                log.push(&source, text);
                bytes.clear();
            }
        })
    }

    /// Adds a line of the fixture's own.
    pub(crate) fn push(&self, source: &str, text: String) {
        let line = Line { at: Instant::now(), source: source.to_owned(), text };
        self.lines.lock().unwrap().push(line);
        self.grown.notify_all();
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap().clone()
    }

    /// The first line of `source` that contains `needle`.
    pub fn find(&self, source: &str, needle: &str) -> Option<Line> {
        let lines = self.lines.lock().unwrap();
        lines.iter().find(|l| l.source == source && l.text.contains(needle)).cloned()
    }

    /// Waits until there is such a line.
    pub fn wait_for(&self, source: &str, needle: &str, at_most: Duration) -> Option<Line> {
        self.wait_for_line(|l| l.source == source && l.text.contains(needle), at_most)
    }

    /// Waits until there is a line that is the one wanted.
    pub(crate) fn wait_for_line(&self, wanted: impl Fn(&Line) -> bool, at_most: Duration) -> Option<Line> {
        let matches = |l: &&Line| wanted(l);
        let lines = self.lines.lock().unwrap();
        let missing = |lines: &mut Vec<Line>| !lines.iter().any(|l| matches(&l));
        let (lines, _) = self.grown.wait_timeout_while(lines, at_most, missing).unwrap();
        lines.iter().find(matches).cloned()
    }

    /// The whole log as text, with seconds since the Pod was made.
    pub fn text(&self) -> String {
        let line = |l: &Line| {
            let seconds = l.at.duration_since(self.started).as_secs_f64();
            format!("{seconds:8.3} {:11} {}\n", l.source, l.text)
        };
        self.lines.lock().unwrap().iter().map(line).collect()
    }
}
