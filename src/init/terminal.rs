//! The terminal, which is given to the child only by the one that has it.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// The controlling terminal while we are in its foreground.
///
/// A background job that calls tcsetpgrp takes the terminal from the shell that started it: so it is asked first
/// whose it is (tini and catatonit do not).
#[derive(Debug)]
pub struct Terminal(OwnedFd);

impl Terminal {
    /// The terminal, if it is ours to give.
    #[must_use]
    pub fn in_foreground() -> Option<Terminal> {
        let own = |fd: &dyn Fn() -> std::io::Result<OwnedFd>| {
            let fd = fd().ok()?;
            (tcgetpgrp(&fd) == Ok(getpgrp())).then_some(Terminal(fd))
        };
        own(&|| std::io::stdin().as_fd().try_clone_to_owned())
            .or_else(|| own(&|| std::io::stdout().as_fd().try_clone_to_owned()))
            .or_else(|| own(&|| std::io::stderr().as_fd().try_clone_to_owned()))
            .or_else(|| {
                own(&|| {
                    let tty = OpenOptions::new().read(true).custom_flags(libc::O_NOCTTY).open("/dev/tty");
                    tty.map(OwnedFd::from)
                })
            })
    }

    /// Its fd, for use between fork and exec.
    #[must_use]
    pub fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Gives it to the child's process group again, if a shell has given it to ours (`fg`).
    pub fn pass_on(&self, group: i32) {
        if tcgetpgrp(&self.0) == Ok(getpgrp()) {
            // Refused where the terminal is gone: then there is nothing to give.
            let _ = tcsetpgrp(&self.0, Pid::from_raw(group));
        }
    }
}
