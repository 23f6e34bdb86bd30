//! At rest it costs nothing.

use std::thread;
use std::time::{Duration, Instant};

use crate::process::{Launch, number, status, until};
use crate::table::rows;

rows! {
    /// Four seconds in which nothing happens.
    fn wake_ups(init) {
        let run = Launch::of(init).role("ready", &[]).start().ready();
        until("it is idle", || run.is_idle());
        let switches = || {
            let all = status(run.pid);
            number(&all, "voluntary_ctxt_switches") + number(&all, "nonvoluntary_ctxt_switches")
        };
        let (before, start) = (switches(), Instant::now());
        thread::sleep(Duration::from_secs(4));
        let count = switches() - before;
        match (count, count * 1_000 / u64::try_from(start.elapsed().as_millis()).unwrap()) {
            (0, _) => "none".into(),
            (_, 0 | 1) => "one a second".into(),
            (_, more) => format!("{more} a second"),
        }
    }
}
