//! COMMAND's process, from its start to its end.

use std::env;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::process;

use nix::libc;

use super::first::Inherited;
use super::reap::{Change, next_change};
use super::signals::{Arrived, Name};
use super::spawn::{close_inherited, spawn};
use super::terminal::{Terminal, has_shell};
use crate::exit::Exit;
use crate::log::{Field, Log};

/// COMMAND's process.
pub struct Child<'a> {
    pid: i32,
    own_pid: i32,
    terminal: Option<Terminal>,
    /// Signals go to its process group.
    group: bool,
    log: &'a Log,
}

impl<'a> Child<'a> {
    /// Starts COMMAND, then lets go of what outlast was started with. `keep` are our own fds.
    ///
    /// # Errors
    /// COMMAND could not be started; the log says why.
    pub fn start(command: &[OsString], group: bool, keep: &[RawFd], log: &'a Log) -> Result<Child<'a>, Exit> {
        let own_pid = process::id().cast_signed();
        let terminal = Terminal::controlling();
        let to_give = terminal.as_ref().filter(|terminal| terminal.is_ours());
        let pid = spawn(command, to_give, Inherited::get()).map_err(|refused| refused.tell(command, log))?;
        let mut keep = keep.to_vec();
        keep.extend(terminal.as_ref().map(Terminal::raw));
        close_inherited(&keep);
        // A working directory pins its mount. Where / cannot be entered, nothing is lost but that.
        let _ = env::set_current_dir("/");
        log.debug("started", &[("pid", &pid)]);
        Ok(Child { pid, own_pid, terminal, group, log })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Passes on what is meant for it.
    pub fn pass_on(&self, arrived: Arrived) {
        if arrived.is_for_child(self.own_pid) {
            self.signal(arrived.number);
        }
    }

    /// Passes a stop signal on. A stopped process would not notice it: SIGCONT follows, as in systemd.
    pub fn stop(&self, number: i32) {
        self.log.info("stop signal forwarded", &[("signal", &Name(number)), ("pid", &self.pid)]);
        self.signal(number);
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, number: i32) {
        if let (libc::SIGCONT, Some(terminal)) = (number, &self.terminal) {
            terminal.pass_on(self.pid);
        }
        // SAFETY: plain numbers; the child is not reaped yet, so the pid is its own. nix's kill knows no
        // real-time signals.
        let sent = unsafe {
            // Its group is empty where it has moved to another: then it alone is meant.
            (self.group && libc::kill(self.pid.saturating_neg(), number) == 0)
                || libc::kill(self.pid, number) == 0
        };
        if !sent {
            let error = std::io::Error::last_os_error();
            let fields: [Field; 3] = [("signal", &Name(number)), ("pid", &self.pid), ("error", &error)];
            self.log.warn("cannot signal COMMAND", &fields);
        }
    }

    /// Reaps whatever there is, then says how COMMAND ended, if it did.
    #[must_use]
    pub fn reap(&self) -> Option<Exit> {
        let mut exit = None;
        while let Some((pid, change)) = next_change() {
            if pid != self.pid {
                continue;
            }
            match change {
                Change::Exited(status) => exit = Some(Exit::Status(status)),
                Change::Killed(number) => exit = Some(Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX))),
                Change::Stopped(number) => self.on_stopped(number),
            }
        }
        exit
    }

    /// ^Z stopped COMMAND, or it has read from a terminal that it does not have. The shell that waits for us must see
    /// us stop as well, or no one has the terminal any more. With `fg` comes SIGCONT, which is passed on.
    ///
    /// Where there is no such shell, ^Z would not have stopped a COMMAND that was started without us.
    fn on_stopped(&self, number: i32) {
        if self.terminal.is_none() || !matches!(number, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) {
            return;
        }
        if has_shell() {
            // SAFETY: plain numbers.
            unsafe { libc::kill(self.own_pid, libc::SIGSTOP) };
        } else if number == libc::SIGTSTP {
            self.signal(libc::SIGCONT);
        }
    }
}
