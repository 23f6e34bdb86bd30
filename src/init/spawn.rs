//! Starting COMMAND as a plain exec would have done it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::libc;

use super::first::Inherited;
use super::terminal::Terminal;
use crate::exit::Exit;
use crate::log::Log;

/// COMMAND could not be started.
#[derive(Debug)]
pub struct Refused {
    /// 125, 126 or 127.
    pub exit: Exit,
    /// Why, for a person.
    pub why: String,
}

impl Refused {
    /// Tells the log; returns the exit.
    pub fn tell(&self, command: &[OsString], log: &Log) -> Exit {
        let name = command.first().map(|name| name.display().to_string()).unwrap_or_default();
        let status = u8::from(self.exit);
        log.error("cannot run COMMAND", &[("why", &self.why), ("status", &status), ("command", &name)]);
        self.exit
    }
}

/// Starts COMMAND; returns its pid once it has been executed.
///
/// It gets the mask and dispositions that outlast was started with, its own process group (so that a signal to
/// ours is not doubled), the terminal if it is ours to give, and no new session. Where outlast is not PID 1, the
/// kernel sends it SIGTERM when outlast dies; the kernel forgets that when COMMAND is setuid or has file
/// capabilities (prctl(2), `PR_SET_PDEATHSIG`).
///
/// # Errors
/// As the shells tell them: not found, not executable, or no process could be made.
pub fn spawn(
    command: &[OsString],
    terminal: Option<&Terminal>,
    inherited: Inherited,
) -> Result<i32, Refused> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Refused { exit: Exit::Usage, why: "no COMMAND".into() });
    };
    let terminal = terminal.map(Terminal::raw);
    let parent = std::process::id();
    let mut command = Command::new(program);
    command.args(arguments);
    // SAFETY: between fork and exec the closure makes system calls only; it allocates nothing, locks nothing.
    unsafe {
        command.pre_exec(move || {
            prepare_child(terminal, parent);
            inherited.restore();
            Ok(())
        });
    }
    match command.spawn() {
        Ok(child) => Ok(child.id().cast_signed()),
        Err(error) => Err(explain(program, &error)),
    }
}

/// Becomes COMMAND, as if outlast had never been; returns only where that fails.
#[must_use]
pub fn replace(command: &[OsString], inherited: Inherited) -> Refused {
    let Some((program, arguments)) = command.split_first() else {
        return Refused { exit: Exit::Usage, why: "no COMMAND".into() };
    };
    let mut command = Command::new(program);
    command.args(arguments);
    // SAFETY: the closure makes system calls only.
    unsafe {
        command.pre_exec(move || {
            inherited.restore();
            Ok(())
        });
    }
    explain(program, &command.exec())
}

/// Nothing here is worth not starting COMMAND for. All signals are blocked, SIGTTOU too, without which tcsetpgrp
/// would stop us.
fn prepare_child(terminal: Option<RawFd>, parent: u32) {
    // SAFETY: system calls with plain numbers.
    unsafe {
        libc::setpgid(0, 0);
        if let Some(terminal) = terminal {
            libc::tcsetpgrp(terminal, libc::getpid());
        }
        if parent != 1 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            // It died before it could be bound to us: do what the kernel would have done.
            if libc::getppid() != parent.cast_signed() {
                libc::raise(libc::SIGTERM);
            }
        }
    }
}

/// Closes what outlast was started with and has no use for: a reader at the other end waits for our copy, too.
/// All of `keep` are ours.
pub fn close_inherited(keep: &[RawFd]) {
    let mut keep = keep.to_vec();
    keep.sort_unstable();
    let mut first = 3;
    for kept in keep {
        close_range(first, kept.saturating_sub(1));
        first = kept.saturating_add(1).max(first);
    }
    close_range(first, RawFd::MAX);
}

fn close_range(first: RawFd, last: RawFd) {
    // SAFETY: no fd in this range belongs to anything of ours.
    if first > last || unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } == 0 {
        return;
    }
    // Before Linux 5.9, or where seccomp refuses it.
    let Ok(fds) = fs::read_dir("/proc/self/fd") else { return };
    let fds: Vec<RawFd> = fds.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse().ok()).collect();
    for fd in fds.into_iter().filter(|fd| (first..=last).contains(fd)) {
        // SAFETY: as above; the listing's own fd is closed by now, and closing it again says EBADF.
        unsafe { libc::close(fd) };
    }
}

/// The exit status and the reason that exec's bare error leaves to guess.
fn explain(program: &OsStr, error: &io::Error) -> Refused {
    let found = find(program);
    let refused = |exit, why: String| Refused { exit, why };
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => match found.as_deref().and_then(missing_interpreter) {
            Some(interpreter) => {
                refused(Exit::NotExecutable, format!("its interpreter {interpreter:?} is missing"))
            }
            None if found.is_some() => {
                refused(Exit::NotExecutable, "its interpreter or a part of it is missing".into())
            }
            None => refused(Exit::NotFound, "not found".into()),
        },
        Some(libc::EACCES | libc::EISDIR) => {
            let why = match found.as_deref().map(fs::metadata) {
                Some(Ok(file)) if file.is_dir() => "is a directory".into(),
                Some(Ok(file)) if file.permissions().mode() & 0o111 == 0 => "is not executable".into(),
                _ => error.to_string(),
            };
            refused(Exit::NotExecutable, why)
        }
        Some(libc::ENOEXEC) => {
            let elf = found
                .as_deref()
                .is_some_and(|path| head(path).is_ok_and(|head| head.starts_with(b"\x7fELF")));
            let why = if elf {
                "is a program for another architecture"
            } else {
                "is neither a program nor a script with a #! line"
            };
            refused(Exit::NotExecutable, why.into())
        }
        Some(libc::E2BIG) => {
            refused(Exit::NotExecutable, "its arguments and environment are too long".into())
        }
        // fork's own: no process, no memory.
        Some(libc::EAGAIN | libc::ENOMEM) => refused(Exit::Failure, error.to_string()),
        _ if error.kind() == ErrorKind::InvalidInput => refused(Exit::NotFound, error.to_string()),
        _ => refused(Exit::NotExecutable, error.to_string()),
    }
}

/// The file that exec would have taken.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into()).filter(|path: &PathBuf| path.exists());
    }
    if program.is_empty() {
        return None;
    }
    // As execvp of musl.
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/bin:/usr/bin".into());
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.exists())
}

/// The interpreter that a `#!` line names and that is not there.
fn missing_interpreter(path: &Path) -> Option<String> {
    let head = head(path).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = String::from_utf8_lossy(line);
    let interpreter = line.split_ascii_whitespace().next()?;
    (!Path::new(interpreter).exists()).then(|| interpreter.to_string())
}

/// The beginning of a file, as much as the kernel looks at (`BINPRM_BUF_SIZE`).
fn head(path: &Path) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    File::open(path)?.take(256).read_to_end(&mut head)?;
    Ok(head)
}
