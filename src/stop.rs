//! The stop signals of the commands that start nothing: TERM, INT and QUIT end them.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use nix::libc::{SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use signal_hook::flag::register_usize;
use signal_hook::low_level::pipe;

use crate::init::first;

/// Tells whether a stop signal has come.
#[derive(Debug)]
pub struct Stop {
    wake: UnixStream,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Catches the stop signals, then lets through those that have come since the start of the process. All that is
    /// neither these nor a terminal's stop stays blocked: none of it may end a hold.
    ///
    /// # Errors
    /// No fd or no memory is left.
    pub fn catch() -> io::Result<Stop> {
        let (wake, write) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        let signal = Arc::new(AtomicUsize::new(0));
        for number in [SIGTERM, SIGINT, SIGQUIT] {
            register_usize(number, Arc::clone(&signal), number.unsigned_abs() as usize)?;
            pipe::register(number, write.try_clone()?)?;
        }
        first::let_through(&[SIGTERM, SIGINT, SIGQUIT, SIGTSTP]);
        Ok(Stop { wake, signal })
    }

    /// Waits for so long, or until a stop signal comes; returns its number.
    pub fn wait(&mut self, time: Duration) -> Option<i32> {
        let mut fds = [PollFd::new(self.wake.as_fd(), PollFlags::POLLIN)];
        // EINTR is the signal itself.
        let _ = ppoll(&mut fds, Some(TimeSpec::from(time)), None);
        let _ = self.wake.read(&mut [0; 16]);
        i32::try_from(self.signal.load(SeqCst)).ok().filter(|number| *number != 0)
    }
}
