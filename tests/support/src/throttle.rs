//! Processes that get little of a CPU.

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The length of a round: the kernel's own default for a quota.
const PERIOD: Duration = Duration::from_millis(100);

/// A quota on processes. It ends with this value.
#[derive(Debug)]
pub struct Throttle(Means);

#[derive(Debug)]
enum Means {
    /// The kernel's, by a control group.
    Group(PathBuf),
    /// Where no group can be made: stopped for most of each period.
    Signals { over: Arc<AtomicBool>, thread: Option<JoinHandle<()>> },
}

impl Throttle {
    pub(crate) fn start(pids: &[i32], percent: u32) -> Result<Self> {
        anyhow::ensure!(!pids.is_empty(), "nothing to throttle");
        match group(pids, percent) {
            Ok(group) => Ok(Self(Means::Group(group))),
            Err(_) => Ok(Self(signals(pids.to_vec(), percent))),
        }
    }
}

/// In version 1 the controller has a tree of its own, in version 2 it has to be there for groups below the root.
fn group(pids: &[i32], percent: u32) -> Result<PathBuf> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let (period, quota) = (PERIOD.as_micros(), PERIOD.as_micros() * u128::from(percent) / 100);
    let version_1 = Path::new("/sys/fs/cgroup/cpu");
    let parent = if version_1.is_dir() { version_1 } else { Path::new("/sys/fs/cgroup") };
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let group = parent.join(format!("pod-fixture-{}-{number}", std::process::id()));
    fs::create_dir(&group)?;
    let fill = || -> Result<()> {
        if parent == version_1 {
            fs::write(group.join("cpu.cfs_period_us"), period.to_string())?;
            fs::write(group.join("cpu.cfs_quota_us"), quota.to_string())?;
        } else {
            fs::write(group.join("cpu.max"), format!("{quota} {period}"))?;
        }
        for pid in pids {
            fs::write(group.join("cgroup.procs"), pid.to_string()).context("cgroup.procs")?;
        }
        Ok(())
    };
    fill().inspect_err(|_| empty(&group)).map(|()| group.clone())
}

/// Gives the processes back to the parent; a group can only be removed when it has none.
fn empty(group: &Path) {
    let parent = group.with_file_name("cgroup.procs");
    for _ in 0..100 {
        for pid in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&parent, pid);
        }
        if fs::remove_dir(group).is_ok() || !group.exists() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn signals(pids: Vec<i32>, percent: u32) -> Means {
    let over = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&over);
    let thread = thread::spawn(move || {
        let send = |signal| {
            for pid in &pids {
                let _ = kill(Pid::from_raw(*pid), signal);
            }
        };
        let run = PERIOD * percent / 100;
        while !ends.load(Ordering::Relaxed) {
            send(Signal::SIGSTOP);
            thread::sleep(PERIOD.saturating_sub(run));
            send(Signal::SIGCONT);
            thread::sleep(run);
        }
    });
    Means::Signals { over, thread: Some(thread) }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        match &mut self.0 {
            Means::Group(group) => empty(group),
            Means::Signals { over, thread } => {
                over.store(true, Ordering::Relaxed);
                let _ = thread.take().map(JoinHandle::join);
            }
        }
    }
}
