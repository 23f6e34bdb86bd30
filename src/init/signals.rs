//! Signals as data: all are blocked, and read from a signalfd together with who sent them.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::first::{ALL, Mask, take_over};
use crate::exit::Exit;
use crate::log::Log;

/// A signal that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Its number; real-time signals included.
    pub number: i32,
    /// A process sent it (and not the kernel).
    pub sent: bool,
    /// The sender as this PID namespace numbers it; 0 for one outside.
    pub sender: i32,
}

impl Arrived {
    /// Whether the child is to get it.
    ///
    /// SIGCHLD speaks of our own children. PIPE and URG come from what we do ourselves, unless another process
    /// sent them. And what we caused (`si_pid` is ours) is nobody else's.
    #[must_use]
    pub fn is_for_child(self, own_pid: i32) -> bool {
        let caused_by_us = self.sent && self.sender == own_pid;
        match self.number {
            libc::SIGCHLD => false,
            libc::SIGPIPE | libc::SIGURG => self.sent && !caused_by_us,
            _ => !caused_by_us,
        }
    }
}

/// A signal's name: `SIGTERM`, `SIGRTMIN+3`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name(pub i32);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The kernel's first real-time signal. What libc calls SIGRTMIN is what it leaves of them.
        const FIRST: i32 = 32;
        match nix::sys::signal::Signal::try_from(self.0) {
            Ok(signal) => f.write_str(signal.as_str()),
            Err(_) if self.0 >= FIRST => write!(f, "SIGRT{}", self.0.saturating_sub(FIRST)),
            Err(_) => write!(f, "signal {}", self.0),
        }
    }
}

/// The queue of signals.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Becomes the parent of children and orphans, and the reader of all signals.
    ///
    /// # Errors
    /// No fd, or no memory for one; the log says so. Not to become a subreaper is no error.
    pub fn take_over(log: &Log) -> Result<Signals, Exit> {
        take_over();
        if std::process::id() != 1
            && let Err(error) = nix::sys::prctl::set_child_subreaper(true)
        {
            log.debug("cannot become a subreaper: orphans go to another init", &[("error", &error)]);
        }
        Signals::open().map_err(|error| {
            log.error("cannot open the queue of signals", &[("error", &error)]);
            Exit::Failure
        })
    }

    /// Opens the queue. All signals must be blocked.
    fn open() -> io::Result<Signals> {
        let mask: Mask = ALL;
        // SAFETY: the pointer is to a mask of the size that is passed.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_signalfd4,
                -1,
                &raw const mask,
                size_of::<Mask>(),
                libc::SFD_CLOEXEC | libc::SFD_NONBLOCK,
            )
        };
        let fd = i32::try_from(Errno::result(fd)?).map_err(io::Error::other)?;
        // SAFETY: a new fd that only this struct has.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Its fd.
    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Waits until a signal is there or the time is over; without a time for ever.
    pub fn wait(&self, time: Option<Duration>) {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        // EINTR cannot come while everything is blocked, and would only mean to look again.
        let _ = ppoll(&mut fds, time.map(TimeSpec::from), None);
    }

    /// The next signal, if there is one.
    #[must_use]
    pub fn next(&self) -> Option<Arrived> {
        const SIZE: usize = size_of::<libc::signalfd_siginfo>();
        let mut info = std::mem::MaybeUninit::<libc::signalfd_siginfo>::uninit();
        // SAFETY: the buffer has the size that is passed; it is read only where the kernel has filled all of it.
        let info = unsafe {
            let read = libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), SIZE);
            (usize::try_from(read) == Ok(SIZE)).then(|| info.assume_init())
        }?;
        Some(Arrived {
            number: i32::try_from(info.ssi_signo).ok()?,
            // SI_USER is 0, SI_QUEUE and SI_TKILL are negative; what the kernel makes is positive.
            sent: info.ssi_code <= 0,
            sender: i32::try_from(info.ssi_pid).unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_on() {
        let own = 1;
        let all = |number| {
            let is = |sent, sender| Arrived { number, sent, sender }.is_for_child(own);
            // From another process, from outside, from the kernel, from ourselves.
            [is(true, 9), is(true, 0), is(false, 0), is(true, own)]
        };
        for number in (1..=64).filter(|n| ![libc::SIGCHLD, libc::SIGPIPE, libc::SIGURG].contains(n)) {
            assert_eq!(all(number), [true, true, true, false], "{}", Name(number));
        }
        assert_eq!(all(libc::SIGPIPE), [true, true, false, false]);
        assert_eq!(all(libc::SIGURG), [true, true, false, false]);
        assert_eq!(all(libc::SIGCHLD), [false; 4]);
    }

    #[test]
    fn names() {
        assert_eq!(Name(15).to_string(), "SIGTERM");
        assert_eq!(Name(34).to_string(), "SIGRT2");
    }
}
