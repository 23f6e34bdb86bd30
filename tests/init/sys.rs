//! System calls, thinly wrapped: nix knows no real-time signals, and libc hides the signals that it keeps for itself.
#![allow(clippy::undocumented_unsafe_blocks, reason = "plain system calls: numbers, and pointers to locals")]

use std::ffi::{CStr, CString, OsString};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{null, null_mut};
use std::time::Duration;

pub use nix::libc;

/// The catchable signals, 1 to 64.
pub fn catchable() -> impl Iterator<Item = i32> {
    (1..=64).filter(|n| ![libc::SIGKILL, libc::SIGSTOP].contains(n))
}

pub fn name(signal: i32) -> String {
    match nix::sys::signal::Signal::try_from(signal) {
        Ok(signal) => signal.as_str().trim_start_matches("SIG").into(),
        Err(_) => format!("RT{}", signal - 32),
    }
}

/// Space between names; ranges of real-time signals as one.
pub fn names(signals: &[i32]) -> String {
    if signals.is_empty() {
        return "none".into();
    }
    signals.iter().map(|n| name(*n)).collect::<Vec<_>>().join(" ")
}

pub fn check(result: i32) -> io::Result<i32> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

pub fn kill(pid: i32, signal: i32) {
    assert!(pid > 1, "never all of the machine");
    check(unsafe { libc::kill(pid, signal) }).unwrap();
}

pub fn set_mask(mask: u64) {
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const mask, null_mut::<u64>(), 8);
    }
}

/// The kernel's `struct sigaction`.
#[repr(C)]
struct Action {
    handler: usize,
    flags: u64,
    restorer: usize,
    mask: u64,
}

pub fn ignore(signal: i32) {
    set_disposition(signal, libc::SIG_IGN);
}

pub fn set_disposition(signal: i32, handler: usize) {
    let action = Action { handler, flags: 0, restorer: 0, mask: 0 };
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, null_mut::<Action>(), 8) };
}

/// The next of all blocked signals; with a time of zero only what is there already.
pub fn take_signal(time: Option<Duration>) -> Option<i32> {
    take_signal_of(u64::MAX, time)
}

fn take_signal_of(mask: u64, time: Option<Duration>) -> Option<i32> {
    let time = time.map(|time| libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: 0 });
    let time = time.as_ref().map_or(null(), |time| &raw const *time);
    loop {
        let got =
            unsafe { libc::syscall(libc::SYS_rt_sigtimedwait, &raw const mask, null_mut::<u8>(), time, 8) };
        match i32::try_from(got) {
            Ok(signal @ 1..) => return Some(signal),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return None,
        }
    }
}

pub fn c(text: &str) -> CString {
    CString::new(text).unwrap()
}

pub fn mount(
    kind: Option<&CStr>,
    source: Option<&CStr>,
    target: &CStr,
    flags: u64,
    data: Option<&CStr>,
) -> io::Result<()> {
    let pointer = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    let data = pointer(data).cast();
    check(unsafe { libc::mount(pointer(source), target.as_ptr(), pointer(kind), flags, data) }).map(drop)
}

pub fn unshare(flags: i32) -> io::Result<()> {
    check(unsafe { libc::unshare(flags) }).map(drop)
}

pub fn set_limit(resource: libc::__rlimit_resource_t, value: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
    check(unsafe { libc::setrlimit(resource, &raw const limit) }).map(drop)
}

/// Becomes an unprivileged user, whose id no one else has.
pub fn become_user(id: u32) -> io::Result<()> {
    check(unsafe { libc::setgroups(0, null()) })?;
    check(unsafe { libc::setresgid(id, id, id) })?;
    check(unsafe { libc::setresuid(id, id, id) }).map(drop)
}

/// Executes a program with an environment that `Command` would not take.
pub fn execution(argv: &[OsString], environment: Vec<CString>) -> crate::process::Setup {
    let argv: Vec<CString> = argv.iter().map(|word| CString::new(word.as_bytes()).unwrap()).collect();
    // Pointers are not Send; the strings that they point to move with them, and stay where they are.
    let pointers = |strings: &[CString]| -> Vec<usize> {
        strings.iter().map(|string| string.as_ptr() as usize).chain([0]).collect()
    };
    let (argv_pointers, environment_pointers) = (pointers(&argv), pointers(&environment));
    Box::new(move || {
        let path = argv[0].as_ptr();
        let _ = &environment;
        unsafe { libc::execve(path, argv_pointers.as_ptr().cast(), environment_pointers.as_ptr().cast()) };
        Err(io::Error::last_os_error())
    })
}

/// Root without `CAP_KILL`, from the next exec on.
pub fn drop_the_right_to_kill() -> io::Result<()> {
    const CAP_KILL: i32 = 5;
    check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, CAP_KILL) }).map(drop)
}

/// Lets another process send it to this one.
pub fn signal_from_a_child(signal: i32) -> io::Result<()> {
    let own = unsafe { libc::getpid() };
    let child = check(unsafe { libc::fork() })?;
    if child == 0 {
        unsafe { libc::kill(own, signal) };
        unsafe { libc::_exit(0) };
    }
    check(unsafe { libc::waitpid(child, null_mut(), 0) })?;
    // Of the child's end nothing shall be left.
    while take_signal_of(1 << (libc::SIGCHLD - 1), Some(Duration::ZERO)).is_some() {}
    Ok(())
}

/// For the tracer below.
pub fn trace_me() -> io::Result<()> {
    ptrace(libc::PTRACE_TRACEME, 0)
}

/// Lets a traced process that is stopped go on: `PTRACE_SINGLESTEP` or `PTRACE_DETACH`.
pub fn trace(request: libc::c_uint, pid: i32) {
    ptrace(request, pid).unwrap();
}

fn ptrace(request: libc::c_uint, pid: i32) -> io::Result<()> {
    if unsafe { libc::ptrace(request, pid, 0, 0) } == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits for a traced process to stop.
pub fn wait_for_stop(pid: i32) {
    let mut status = 0;
    check(unsafe { libc::waitpid(pid, &raw mut status, 0) }).unwrap();
    assert!(libc::WIFSTOPPED(status), "{status:x}");
}

/// From now on the kernel refuses these system calls, as a container's seccomp profile does.
pub fn refuse(calls: &[i64], errno: i32) -> io::Result<()> {
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: u16::try_from(code).unwrap_or(0), jt, jf, k };
    // A fixed room: this runs between fork and exec.
    let mut filter = [op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW); 20];
    // The first field of struct seccomp_data is the call's number.
    filter[0] = op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    let refused = libc::SECCOMP_RET_ERRNO | errno.cast_unsigned();
    for (index, call) in calls.iter().enumerate() {
        let call = u32::try_from(*call).unwrap_or(u32::MAX);
        filter[1 + 2 * index] = op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, call);
        filter[2 + 2 * index] = op(libc::BPF_RET | libc::BPF_K, 0, 0, refused);
    }
    let program = libc::sock_fprog { len: 20, filter: filter.as_mut_ptr() };
    unsafe {
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)).map(drop)
    }
}

/// Whether the other end of the pipe or socket is there within the time.
pub fn readable(fd: &impl AsRawFd, time: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let time = i32::try_from(time.as_millis()).unwrap();
    unsafe { libc::poll(&raw mut poll, 1, time) > 0 }
}

pub fn pidfd(pid: i32) -> OwnedFd {
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    unsafe { OwnedFd::from_raw_fd(check(i32::try_from(fd).unwrap()).unwrap()) }
}

/// A file without a name.
pub fn memory_file() -> OwnedFd {
    unsafe { OwnedFd::from_raw_fd(check(libc::memfd_create(c"stderr".as_ptr(), libc::MFD_CLOEXEC)).unwrap()) }
}

/// A new terminal: its master and its slave. No other thread's child gets them (openpty is not so careful).
pub fn terminal() -> (OwnedFd, OwnedFd) {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    unsafe {
        let master = OwnedFd::from_raw_fd(check(libc::posix_openpt(flags)).unwrap());
        check(libc::unlockpt(master.as_raw_fd())).unwrap();
        let slave = check(libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags)).unwrap();
        (master, OwnedFd::from_raw_fd(slave))
    }
}

/// Makes stdin the controlling terminal of a new session.
pub fn own_terminal() -> io::Result<()> {
    check(unsafe { libc::setsid() })?;
    check(unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) }).map(drop)
}

pub fn foreground(terminal: &impl AsRawFd) -> i32 {
    unsafe { libc::tcgetpgrp(terminal.as_raw_fd()) }
}
