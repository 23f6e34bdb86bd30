//! Writing without ever waiting.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, send};
use nix::sys::stat::{SFlag, fstat};

/// Writes all of `bytes` now, or fails.
///
/// The open file belongs to others as well (the child, the runtime): setting `O_NONBLOCK` on it would change
/// it for them. So each kind of file is asked in its own way.
///
/// # Errors
/// `WouldBlock` where no one reads; else what the write failed with.
pub fn write_now(fd: BorrowedFd, bytes: &[u8]) -> io::Result<()> {
    let kind = SFlag::from_bits_truncate(fstat(fd)?.st_mode) & SFlag::S_IFMT;
    let written = match kind {
        SFlag::S_IFSOCK => send(fd.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?,
        SFlag::S_IFIFO => write_pipe(fd, bytes)?,
        SFlag::S_IFCHR => write_device(fd, bytes)?,
        // A file on a disk is always ready.
        _ => nix::unistd::write(fd, bytes)?,
    };
    if written == bytes.len() { Ok(()) } else { Err(ErrorKind::WriteZero.into()) }
}

fn write_pipe(fd: BorrowedFd, bytes: &[u8]) -> nix::Result<usize> {
    let slice = io::IoSlice::new(bytes);
    // SAFETY: IoSlice has the layout of iovec, and both live until the call returns. An offset of -1 is the
    // file's own (pwritev2(2)).
    let written = unsafe {
        libc::syscall(
            libc::SYS_pwritev2,
            fd.as_raw_fd(),
            &raw const slice,
            1,
            -1_i64,
            -1_i64,
            libc::RWF_NOWAIT,
        )
    };
    match Errno::result(written) {
        // Kernels that know no RWF_NOWAIT for pipes: where there is room, it is for PIPE_BUF bytes.
        Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS) => {
            wait_for_room(fd)?;
            nix::unistd::write(fd, bytes)
        }
        result => Ok(usize::try_from(result?).unwrap_or_default()),
    }
}

/// A terminal that is stopped (^S, or a master that no one reads) blocks its writers: an open file of our own
/// need not wait.
fn write_device(fd: BorrowedFd, bytes: &[u8]) -> io::Result<usize> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let own = OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path);
    if let Ok(mut own) = own {
        return own.write(bytes);
    }
    wait_for_room(fd)?;
    Ok(nix::unistd::write(fd, bytes)?)
}

fn wait_for_room(fd: BorrowedFd) -> nix::Result<()> {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut fds, PollTimeout::ZERO)? == 0 { Err(Errno::EAGAIN) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    fn fill(fd: BorrowedFd) -> usize {
        let line = [b'x'; 4096];
        (0..10_000).take_while(|_| write_now(fd, &line).is_ok()).count()
    }

    #[test]
    fn a_pipe_takes_lines_until_it_is_full_and_then_refuses() {
        let (mut reader, writer) = io::pipe().unwrap();
        let lines = fill(writer.as_fd());
        assert!(lines > 0);
        assert_eq!(write_now(writer.as_fd(), b"x").unwrap_err().kind(), ErrorKind::WouldBlock);
        let mut all = vec![0; lines * 4096];
        reader.read_exact(&mut all).unwrap();
        assert!(write_now(writer.as_fd(), b"x").is_ok());
        drop(reader);
        assert_eq!(write_now(writer.as_fd(), b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_socket_is_not_waited_for() {
        let (reader, writer) = UnixStream::pair().unwrap();
        assert!(fill(writer.as_fd()) > 0);
        assert!(write_now(writer.as_fd(), b"x").is_err());
        drop(reader);
        assert_eq!(write_now(writer.as_fd(), b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    }

    #[test]
    fn a_full_device_is_an_error() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(write_now(full.as_fd(), b"x").unwrap_err().kind(), ErrorKind::StorageFull);
    }

    #[test]
    fn a_terminal_that_no_one_reads_is_not_waited_for() {
        let pty = nix::pty::openpty(None, None).unwrap();
        assert!(fill(pty.slave.as_fd()) < 10_000);
    }
}
