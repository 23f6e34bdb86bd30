//! CPU time and other times, and what is made of many of them.

use anyhow::{Context, Result, ensure};
use std::io;
use std::mem::MaybeUninit;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Times in seconds, or any other figures.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, sample: f64) {
        self.0.push(sample);
        self.0.sort_by(f64::total_cmp);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The value below which this part of all lies.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let at = (last as f64 * part).ceil() as usize;
        self.0.get(at.min(last)).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&self) -> f64 {
        let (low, high) = (self.0.len().saturating_sub(1) / 2, self.0.len() / 2);
        let at = |index: usize| self.0.get(index).copied().unwrap_or(f64::NAN);
        f64::midpoint(at(low), at(high))
    }

    /// As the processes of one run hand them over.
    pub(crate) fn to_text(&self) -> String {
        self.0.iter().map(|sample| format!("{sample:e}")).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn from_text(text: &str) -> Result<Samples> {
        let mut samples = Samples::default();
        for sample in text.split(',').filter(|sample| !sample.is_empty()) {
            samples.push(sample.parse().with_context(|| format!("not a figure: {sample:?}"))?);
        }
        Ok(samples)
    }
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec that outlives the call.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The CPU time of this thread, kernel's and own, to the nanosecond.
pub(crate) fn thread_cpu() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// The one clock that all processes of the machine share.
pub(crate) fn now() -> Duration {
    clock(libc::CLOCK_MONOTONIC)
}

/// The CPU time of one of `count` runs of `work` in this thread, in seconds.
pub(crate) fn per_run(count: u32, mut work: impl FnMut()) -> f64 {
    let before = thread_cpu();
    (0..count).for_each(|_| work());
    (thread_cpu() - before).as_secs_f64() / f64::from(count)
}

/// Waits for a process; the CPU time of it and of all its descendants that were waited for, in seconds.
pub(crate) fn wait(child: &Child) -> Result<(i32, f64)> {
    let (mut status, mut usage) = (0, MaybeUninit::<libc::rusage>::zeroed());
    let pid = libc::pid_t::try_from(child.id())?;
    // SAFETY: both pointers are to values that outlive the call; all-zero is a valid rusage.
    let usage = unsafe {
        if libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) != pid {
            return Err(io::Error::last_os_error().into());
        }
        usage.assume_init()
    };
    #[allow(clippy::cast_precision_loss)]
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok((status, seconds(usage.ru_utime) + seconds(usage.ru_stime)))
}

/// Runs a command to its end; its CPU time in seconds.
pub(crate) fn of_command(command: &mut Command) -> Result<f64> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let (status, cpu) = wait(&child)?;
    ensure!(libc::WIFEXITED(status), "{command:?} did not exit by itself");
    Ok(cpu)
}
