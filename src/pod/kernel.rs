//! The kernel behind a small trait, so that owners can be tested with a script instead of it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use procfs::ProcError;
use procfs::process::{Process, all_processes};

use super::Row;
use super::proc_net::read_table;

/// A process of the container, or of the Pod where the PID namespace is shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visible {
    /// Process id, as this PID namespace numbers it.
    pub pid: i32,
    /// Parent's process id; 0 for a parent outside.
    pub parent: i32,
    /// The name that the kernel keeps (`comm`), at most 15 bytes.
    pub name: String,
}

/// What a look needs of the kernel.
pub trait Kernel {
    /// Every TCP socket of the network namespace: listeners first, then the rest, first v4, then v6. A break
    /// ends the table that is being read, not the others.
    ///
    /// # Errors
    /// A table that cannot be read or understood. A missing v6 table (IPv6 switched off) is none.
    fn rows(&mut self, each: &mut dyn FnMut(Row) -> ControlFlow<()>) -> io::Result<()>;

    /// The live processes; zombies hold nothing and are left out.
    ///
    /// # Errors
    /// /proc that is not mounted or not listed.
    fn processes(&mut self) -> io::Result<Vec<Visible>>;

    /// The inodes of the sockets that a process holds. A process that is gone holds none.
    ///
    /// # Errors
    /// `PermissionDenied` where the fd table may not be read.
    fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64)) -> io::Result<()>;

    /// The effective uid of a process; readable where its fd table is not.
    ///
    /// # Errors
    /// The process is gone, or /proc is.
    fn effective_uid(&mut self, pid: i32) -> io::Result<u32>;

    /// The control groups of a process, as /proc/PID/cgroup names them from here; none where there is no such file.
    fn control_groups(&mut self, pid: i32) -> Option<String>;
}

/// The running kernel, through /proc.
#[derive(Debug)]
pub struct Proc;

impl Kernel for Proc {
    fn rows(&mut self, each: &mut dyn FnMut(Row) -> ControlFlow<()>) -> io::Result<()> {
        let at = |path, error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
        for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
            match File::open(path) {
                Ok(table) => {
                    // A break is of this table alone.
                    let _ = read_table(table, &mut *each).map_err(|error| at(path, error))?;
                }
                Err(error) if path.ends_with('6') && error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(at(path, error)),
            }
        }
        Ok(())
    }

    fn processes(&mut self) -> io::Result<Vec<Visible>> {
        let mut visible = Vec::new();
        for process in all_processes().map_err(to_io)? {
            match process.and_then(|process| process.stat()) {
                Ok(stat) if matches!(stat.state, 'Z' | 'X' | 'x') => {}
                Ok(stat) => visible.push(Visible { pid: stat.pid, parent: stat.ppid, name: stat.comm }),
                // It ended while we were reading, or hidepid=1 shows no more than its number.
                Err(ProcError::NotFound(_) | ProcError::PermissionDenied(_)) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(to_io(error)),
            }
        }
        Ok(visible)
    }

    fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64)) -> io::Result<()> {
        // Plain links, not procfs' FDInfo: that one opens and stats every fd of an Envoy with thousands.
        let table = match fs::read_dir(format!("/proc/{pid}/fd")) {
            Ok(table) => table,
            Err(error) if gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        for fd in table {
            match fd.and_then(|fd| fs::read_link(fd.path())) {
                Ok(target) => {
                    let inode = target.as_os_str().as_bytes().strip_prefix(b"socket:[");
                    let inode = inode.and_then(|rest| rest.strip_suffix(b"]"));
                    if let Some(inode) =
                        inode.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok())
                    {
                        each(inode);
                    }
                }
                Err(error) if gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn effective_uid(&mut self, pid: i32) -> io::Result<u32> {
        Process::new(pid).and_then(|process| process.status()).map(|status| status.euid).map_err(to_io)
    }

    fn control_groups(&mut self, pid: i32) -> Option<String> {
        fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
    }
}

/// A process that ended while it was being read.
fn gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
}

fn is_gone(error: &ProcError) -> bool {
    matches!(error, ProcError::Io(error, _) if gone(error))
}

fn to_io(error: ProcError) -> io::Error {
    match error {
        ProcError::Io(error, _) => error,
        ProcError::NotFound(path) => named(ErrorKind::NotFound, path.as_deref()),
        ProcError::PermissionDenied(path) => named(ErrorKind::PermissionDenied, path.as_deref()),
        other => io::Error::new(ErrorKind::InvalidData, other.to_string()),
    }
}

fn named(kind: ErrorKind, path: Option<&std::path::Path>) -> io::Error {
    io::Error::new(kind, format!("{}: {kind}", path.unwrap_or("/proc".as_ref()).display()))
}

/// The words of a process's command line, in which empty ones and any bytes are possible.
///
/// # Errors
/// The process is gone, or /proc is.
pub fn command_line(pid: i32) -> io::Result<Vec<OsString>> {
    let line = fs::read(format!("/proc/{pid}/cmdline"))?;
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    Ok(line.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect())
}
