//! The terminal, which is given to the child only by the one that has it.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;
use nix::unistd::{Pid, getpgid, getpgrp, getppid, getsid, tcgetpgrp, tcsetpgrp};

/// The controlling terminal.
///
/// A background job that calls tcsetpgrp takes the terminal from the shell that started it: so it is asked first
/// whose it is (tini and catatonit do not).
#[derive(Debug)]
pub struct Terminal(OwnedFd);

impl Terminal {
    /// The terminal, if there is one.
    #[must_use]
    pub fn controlling() -> Option<Terminal> {
        // Any other file, and another session's terminal, says ENOTTY.
        let own = |fd: std::io::Result<OwnedFd>| {
            let fd = fd.ok()?;
            tcgetpgrp(&fd).is_ok().then_some(Terminal(fd))
        };
        own(std::io::stdin().as_fd().try_clone_to_owned())
            .or_else(|| own(std::io::stdout().as_fd().try_clone_to_owned()))
            .or_else(|| own(std::io::stderr().as_fd().try_clone_to_owned()))
            .or_else(|| {
                let tty = OpenOptions::new().read(true).custom_flags(libc::O_NOCTTY).open("/dev/tty");
                own(tty.map(OwnedFd::from))
            })
    }

    /// Whether it is ours to give: our process group has it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        tcgetpgrp(&self.0) == Ok(getpgrp())
    }

    /// Its fd, for use between fork and exec.
    #[must_use]
    pub fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Gives it to the child's process group, if a shell has given it to ours (`fg`).
    pub fn pass_on(&self, group: i32) {
        if self.is_ours() {
            // Refused where the terminal is gone: then there is nothing to give.
            let _ = tcsetpgrp(&self.0, Pid::from_raw(group));
        }
    }
}

/// Whether a shell waits for us that would see us stop and could resume us: our parent, in our session and in another
/// process group. Without one the kernel lets no ^Z stop a process (an orphaned process group, setpgid(2)).
#[must_use]
pub fn has_shell() -> bool {
    let parent = getppid();
    parent.as_raw() != 0
        && getsid(Some(parent)) == getsid(None)
        && getpgid(Some(parent)).is_ok_and(|group| group != getpgrp())
}
