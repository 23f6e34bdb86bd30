//! Reaping.

use nix::libc;

/// What happened to a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It exited with this status.
    Exited(u8),
    /// This signal killed it.
    Killed(i32),
    /// This signal stopped it.
    Stopped(i32),
}

/// The next change of any child, orphans that became ours included; none if there is none now.
///
/// Not through nix: its `waitpid` takes the status of a child that a real-time signal killed for an error, and
/// the child is gone by then.
#[must_use]
pub fn next_change() -> Option<(i32, Change)> {
    let mut status = 0;
    // SAFETY: the pointer is to a status that lives until the call returns.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG | libc::WUNTRACED | libc::__WALL) };
    if pid <= 0 {
        return None;
    }
    let change = if libc::WIFEXITED(status) {
        Change::Exited(u8::try_from(libc::WEXITSTATUS(status)).unwrap_or(u8::MAX))
    } else if libc::WIFSTOPPED(status) {
        Change::Stopped(libc::WSTOPSIG(status))
    } else {
        Change::Killed(libc::WTERMSIG(status))
    };
    Some((pid, change))
}
