//! How the process ends.

use std::process::ExitCode;

/// Every way `outlast` ends, and the status that the caller sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: done.
    Success,
    /// 2: a flag, variable or argument is wrong; nothing was started (the hook held all the same).
    Usage,
    /// 3: `status --check` saw a holder.
    Held,
    /// 4: `status --check` could not see everything.
    Unknown,
    /// 124: the timeout was over, as in timeout(1).
    Timeout,
    /// 125: outlast itself failed before COMMAND ran, as in env(1) and docker-run(1).
    Failure,
    /// 126: COMMAND was found and cannot be executed.
    NotExecutable,
    /// 127: COMMAND was not found.
    NotFound,
    /// 128 + n: COMMAND was killed by signal n, or signal n ended the hook.
    Signal(u8),
    /// COMMAND's own status.
    Status(u8),
}

impl From<Exit> for u8 {
    fn from(exit: Exit) -> u8 {
        match exit {
            Exit::Success => 0,
            Exit::Usage => 2,
            Exit::Held => 3,
            Exit::Unknown => 4,
            Exit::Timeout => 124,
            Exit::Failure => 125,
            Exit::NotExecutable => 126,
            Exit::NotFound => 127,
            Exit::Signal(number) => number.saturating_add(128),
            Exit::Status(status) => status,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(u8::from(exit))
    }
}
