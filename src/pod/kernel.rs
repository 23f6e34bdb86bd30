//! The kernel behind a small trait, so that owners can be tested with a script instead of it.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::{NixPath, libc};
use procfs::ProcError;
use procfs::process::{Process, all_processes};

use super::Row;
use super::proc_net::read_table;
use super::sock_diag::{SockDiag, States};

/// The kernel gives a table out a page at a time at most (`fs/seq_file.c`).
const PAGE: usize = 4096;
/// It looks for as many rows as fit in what is asked for, and for one more, through all of its hash if need be: so where a
/// listener is looked for one row at a time is read (`TMPSZ` of `net/ipv4/tcp_ipv4.c`), and some where it must walk anyhow.
const ONE_ROW: usize = 150;
const FEW_ROWS: usize = 512;

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

/// Which sockets are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those that listen.
    Listeners,
    /// All that can hold.
    ThatMatter,
    /// All, for a person.
    All,
}

/// What a look needs of the kernel.
pub trait Kernel {
    /// The TCP sockets of the network namespace, at least those in scope. Of each family listeners come first.
    ///
    /// # Errors
    /// What cannot be read or understood. Rows may have been given out before. IPv6 that is switched off is none.
    fn rows(&mut self, scope: Scope, each: &mut dyn FnMut(Row)) -> io::Result<()>;

    /// The socket that now has the addresses of `row`: something else than `row` once it has ended. None where the
    /// kernel cannot be asked for one socket.
    ///
    /// # Errors
    /// As for the rows.
    fn find(&mut self, row: &Row) -> Option<io::Result<Option<Row>>>;

    /// One of these sockets that is still there: the first to be found, which is cheaper than to look for all.
    ///
    /// # Errors
    /// As for the rows.
    fn first_there(&mut self, sockets: &[Row]) -> io::Result<Option<Row>>;

    /// The live processes; zombies hold nothing and are left out.
    ///
    /// # Errors
    /// /proc that is not mounted or not listed.
    fn processes(&mut self) -> io::Result<Vec<Visible>>;

    /// Whether a process is still there under its name.
    fn lives(&mut self, process: &Visible) -> bool;

    /// The inodes of the sockets that a process holds, until `each` breaks. A process that is gone holds none.
    ///
    /// # Errors
    /// `PermissionDenied` where the fd table may not be read.
    fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> io::Result<()>;

    /// The effective uid of a process; readable where its fd table is not.
    ///
    /// # Errors
    /// The process is gone, or /proc is.
    fn effective_uid(&mut self, pid: i32) -> io::Result<u32>;

    /// The control groups of a process, as /proc/PID/cgroup names them from here; none where there is no such file.
    fn control_groups(&mut self, pid: i32) -> Option<String>;
}

/// Where sockets are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// `sock_diag` where the kernel answers it, else /proc.
    Auto,
    /// /proc/net/tcp and tcp6.
    Proc,
    /// `sock_diag`.
    Diag,
}

impl Source {
    /// All sources by their names.
    pub const NAMES: [(&'static str, Source); 3] =
        [("auto", Source::Auto), ("proc", Source::Proc), ("diag", Source::Diag)];
}

/// The running kernel. Its buffers are used again from look to look.
#[derive(Debug)]
pub struct System {
    diag: Option<SockDiag>,
    table: Vec<u8>,
    path: String,
    /// The `stat` of processes whose life was asked for: an open one is that process's for ever, and costs no path.
    lives: Vec<(i32, File)>,
    /// What is used, and why not what is faster.
    source: String,
}

/// What has been read enough of.
enum Enough {
    OfThisTable,
    OfAll,
}

impl System {
    /// Decides once where sockets are read.
    #[must_use]
    pub fn open(source: Source) -> System {
        let mut system = System {
            diag: None,
            table: Vec::new(),
            path: String::new(),
            lives: Vec::new(),
            source: "proc".into(),
        };
        if source != Source::Proc {
            let answers = || {
                let mut diag = SockDiag::open()?;
                diag.dump(States::LISTENERS, &mut |_| {})?;
                io::Result::Ok(diag)
            };
            match answers() {
                Ok(diag) => (system.diag, system.source) = (Some(diag), "diag".into()),
                Err(error) => system.source = format!("proc, for sock_diag says: {error}"),
            }
        }
        system
    }

    /// `diag` or `proc`, and why.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Reads both tables, in pieces of so many bytes. `each` may break with whether that was all, or this table alone.
    fn read_tables(
        &mut self,
        piece: usize,
        each: &mut dyn FnMut(Row) -> ControlFlow<Enough>,
    ) -> io::Result<()> {
        for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let table = match File::open(path) {
                Ok(table) => table,
                Err(error) if path.ends_with('6') && error.kind() == ErrorKind::NotFound => continue,
                Err(error) => return Err(at(path, &error)),
            };
            let read = read_table(table, piece, &mut self.table, &mut *each);
            if let ControlFlow::Break(Enough::OfAll) = read.map_err(|error| at(path, &error))? {
                break;
            }
        }
        Ok(())
    }

    fn path_of(&mut self, pid: i32, file: &str) -> &str {
        self.path.clear();
        // Writing to a String cannot fail.
        let _ = write!(self.path, "/proc/{pid}/{file}");
        &self.path
    }
}

impl Kernel for System {
    fn rows(&mut self, scope: Scope, each: &mut dyn FnMut(Row)) -> io::Result<()> {
        let Some(diag) = &mut self.diag else {
            return self.read_tables(PAGE, &mut |row| {
                if scope == Scope::Listeners && !row.listens() {
                    return ControlFlow::Break(Enough::OfThisTable);
                }
                each(row);
                ControlFlow::Continue(())
            });
        };
        let states = match scope {
            Scope::Listeners => States::LISTENERS,
            Scope::ThatMatter => States::THAT_MATTER,
            Scope::All => States::ALL,
        };
        diag.dump(states, each).map_err(|error| at("sock_diag", &error))
    }

    fn find(&mut self, row: &Row) -> Option<io::Result<Option<Row>>> {
        Some(self.diag.as_mut()?.find(row))
    }

    fn first_there(&mut self, sockets: &[Row]) -> io::Result<Option<Row>> {
        let is_one = |row: &Row| sockets.iter().any(|socket| socket.is_socket_of(row));
        let mut there = None;
        if self.diag.is_none() {
            let piece = if sockets.iter().any(Row::listens) { ONE_ROW } else { FEW_ROWS };
            self.read_tables(piece, &mut |row| {
                there = Some(row).filter(is_one);
                if there.is_some() { ControlFlow::Break(Enough::OfAll) } else { ControlFlow::Continue(()) }
            })?;
            return Ok(there);
        }
        for socket in sockets {
            there = self.find(socket).transpose()?.flatten().filter(is_one);
            if there.is_some() {
                break;
            }
        }
        Ok(there)
    }

    fn processes(&mut self) -> io::Result<Vec<Visible>> {
        let mut visible = Vec::new();
        for process in all_processes().map_err(to_io)? {
            let stat = process.and_then(|process| process.open_relative("stat")).map_err(to_io);
            let process = stat.and_then(|stat| {
                read_stat(&stat, |stat| {
                    let name = String::from_utf8_lossy(stat.name).into_owned();
                    stat.alive.then_some(Visible { pid: stat.pid, parent: stat.parent, name })
                })
            });
            match process {
                Ok(process) => visible.extend(process),
                // It ended while we were reading, or hidepid=1 shows no more than its number.
                Err(error) if gone(&error) || error.kind() == ErrorKind::PermissionDenied => {}
                Err(error) => return Err(error),
            }
        }
        // An empty directory, or the /proc of another PID namespace, says nothing of who is there.
        if visible.iter().all(|process| process.pid != own_pid()) {
            return Err(io::Error::other(
                "/proc does not show this process: it is not mounted, or not for this container",
            ));
        }
        Ok(visible)
    }

    fn lives(&mut self, process: &Visible) -> bool {
        let at = self.lives.iter().position(|(pid, _)| *pid == process.pid).unwrap_or_else(|| {
            let file = File::open(self.path_of(process.pid, "stat"));
            self.lives.extend(file.map(|file| (process.pid, file)));
            self.lives.len().saturating_sub(1)
        });
        let Some((_, file)) = self.lives.get(at).filter(|(pid, _)| *pid == process.pid) else { return false };
        let lives =
            read_stat(file, |stat| stat.alive && stat.name == process.name.as_bytes()).unwrap_or(false);
        if !lives {
            // The number may become another's.
            self.lives.swap_remove(at);
        }
        lives
    }

    fn sockets_of(&mut self, pid: i32, each: &mut dyn FnMut(u64) -> ControlFlow<()>) -> io::Result<()> {
        // Plain links, not procfs' FDInfo: that one opens and stats every fd of an Envoy with thousands. And each by its
        // name alone: to walk its path costs more than the rest.
        let path = self.path_of(pid, "fd");
        let (directory, table) = match File::open(path).and_then(|file| Ok((file, fs::read_dir(path)?))) {
            Ok(opened) => opened,
            Err(error) if gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        for fd in table {
            match fd.and_then(|fd| socket_at(&directory, &fd.file_name())) {
                Ok(Some(inode)) if each(inode).is_break() => return Ok(()),
                Ok(_) => {}
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
        fs::read_to_string(self.path_of(pid, "cgroup")).ok()
    }
}

/// This process's id, as the process list has it.
#[must_use]
pub fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

/// What /proc/PID/stat begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat<'a> {
    /// Process id.
    pub pid: i32,
    /// `comm`, any bytes.
    pub name: &'a [u8],
    /// It is no zombie.
    pub alive: bool,
    /// Parent's process id.
    pub parent: i32,
}

fn read_stat<T>(file: &File, see: impl Fn(Stat) -> T) -> io::Result<T> {
    let mut stat = [0; 128];
    let read = file.read_at(&mut stat, 0)?;
    let stat = stat.get(..read).unwrap_or_default();
    parse_stat(stat).map(see).ok_or_else(|| {
        io::Error::new(ErrorKind::InvalidData, format!("/proc/PID/stat: {:?}", String::from_utf8_lossy(stat)))
    })
}

/// `7 (envoy) S 1 ...`: the name may hold anything, and the last parenthesis ends it (`proc_pid_stat(5)`). procfs' own
/// parser takes every file for the kernel's, and panics where it is not.
#[must_use]
pub fn parse_stat(stat: &[u8]) -> Option<Stat<'_>> {
    let open = stat.iter().position(|byte| *byte == b'(')?;
    let close = stat.iter().rposition(|byte| *byte == b')')?;
    let pid = std::str::from_utf8(stat.get(..open)?).ok()?.trim().parse().ok()?;
    let name = stat.get(open.checked_add(1)?..close)?;
    let mut rest = std::str::from_utf8(stat.get(close.checked_add(1)?..)?).ok()?.split_ascii_whitespace();
    let alive = !matches!(rest.next()?, "Z" | "X" | "x");
    Some(Stat { pid, name, alive, parent: rest.next()?.parse().ok()? })
}

/// The inode that an entry of an fd table links to, if it is `socket:[INODE]`.
fn socket_at(table: &File, name: &OsStr) -> io::Result<Option<u64>> {
    // More than enough for such a link; another may be cut.
    let mut link = [0_u8; 64];
    let read = name.with_nix_path(|name| {
        // SAFETY: the name ends with a zero, and the length of the buffer is passed; nix asks for the length first.
        unsafe { libc::readlinkat(table.as_raw_fd(), name.as_ptr(), link.as_mut_ptr().cast(), link.len()) }
    });
    let length = usize::try_from(Errno::result(read?)?).unwrap_or_default();
    let inode = link.get(..length).and_then(|link| link.strip_prefix(b"socket:[")?.strip_suffix(b"]"));
    Ok(inode.and_then(|inode| std::str::from_utf8(inode).ok()?.parse().ok()))
}

fn at(place: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{place}: {error}"))
}

/// A process that ended while it was being read.
fn gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_anything() {
        let stat = |text| parse_stat(text).map(|stat| (stat.pid, stat.name, stat.alive, stat.parent));
        assert_eq!(stat(b"7 (envoy) S 1 7 7 0"), Some((7, &b"envoy"[..], true, 1)));
        assert_eq!(stat(b"7 (a) R (b) Z 0) Z 1 7"), Some((7, &b"a) R (b) Z 0"[..], false, 1)));
        assert_eq!(stat(b"7 (\xff)\xfe) S 1"), Some((7, &b"\xff)\xfe"[..], true, 1)));
        for odd in [&b""[..], b"7", b"7 )(", b"7 (x)", b"7 (x) S", b"x (x) S 1", b"7 (x) S y", b"(x)\xff"] {
            assert_eq!(stat(odd), None);
        }
    }
}
