//! What this test binary does when it is started again as COMMAND, before Rust's start-up: a Rust program would have
//! changed dispositions and fds by `main`.
#![allow(clippy::undocumented_unsafe_blocks, reason = "plain system calls with numbers")]

use std::env;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::ptr::null_mut;

use crate::sys::{self, libc};

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    let arguments: Vec<_> = env::args_os().collect();
    let Some(role) = arguments.get(1).and_then(|role| role.to_str()?.strip_prefix("child:")) else { return };
    let number =
        |index: usize| arguments.get(2 + index).and_then(|argument| argument.to_str()?.parse::<i32>().ok());
    match role {
        "ready" => {
            say("ready");
            sleep();
        }
        "report" => report(number(0), number(1)),
        "exit" => exit(number(0).unwrap_or(0)),
        "raise" => raise(number(0).unwrap_or(0)),
        "state" => say(&given()),
        "orphans" => orphans(number(0).unwrap_or(0), number(1).unwrap_or(0)),
        "orphan" => orphan(),
        "pair" => pair(),
        "stop" => stop(),
        "close" => close(number(0).unwrap_or(-1)),
        "terminal" => say(&format!("COMMAND has: {}.", terminal())),
        "user" => user(number(0), number(1)),
        "arguments" => copy_arguments(),
        "zombie" => zombie(),
        _ => exit(99),
    }
    exit(0);
}

pub fn exit(status: i32) -> ! {
    unsafe { libc::_exit(status) }
}

pub fn sleep() -> ! {
    loop {
        unsafe { libc::pause() };
    }
}

/// One line, in one write.
pub fn say(line: &str) {
    let line = format!("{line}\n");
    if unsafe { libc::write(1, line.as_ptr().cast(), line.len()) } == -1 {
        // The test is over.
        exit(97);
    }
}

/// Says every signal that comes, by its number; ends at signal `last` with this status.
fn report(last: Option<i32>, status: Option<i32>) -> ! {
    sys::set_mask(u64::MAX);
    say("ready");
    loop {
        let Some(signal) = sys::take_signal(None) else { continue };
        say(&signal.to_string());
        if Some(signal) == last {
            exit(status.unwrap_or(0));
        }
    }
}

fn raise(signal: i32) -> ! {
    unsafe { libc::kill(libc::getpid(), signal) };
    sleep();
}

/// All that a process is given by the one that executes it, a line each. Pipes have the same numbers where both
/// processes that are compared are started with the same ones.
fn given() -> String {
    let mut lines = Vec::new();
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    for key in [
        "Name",
        "Umask",
        "Uid",
        "Gid",
        "Groups",
        "SigBlk",
        "SigIgn",
        "SigCgt",
        "SigPnd",
        "ShdPnd",
        "CapInh",
        "CapPrm",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
        "Cpus_allowed",
        "Mems_allowed",
    ] {
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap_or("?");
        lines.push(format!("{key}: {}", value.trim()));
    }
    for file in [
        "limits",
        "environ",
        "cmdline",
        "oom_score_adj",
        "timerslack_ns",
        "personality",
        "coredump_filter",
        "comm",
    ] {
        let bytes = fs::read(format!("/proc/self/{file}")).unwrap_or_default();
        lines.push(format!("{file}: {}", bytes.escape_ascii()));
    }
    for link in ["cwd", "root", "exe"] {
        lines.push(format!("{link}: {:?}", fs::read_link(format!("/proc/self/{link}"))));
    }
    lines.push(format!("nice: {}", unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }));
    lines.push(format!("fds: {}", fds().join(" ")));
    lines.join("\n")
}

/// Every open fd: number, flags, file.
pub fn fds() -> Vec<String> {
    let all: Vec<i32> = (0..1024).filter(|fd| unsafe { libc::fcntl(*fd, libc::F_GETFD) } != -1).collect();
    all.into_iter()
        .map(|fd| {
            let link = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
            let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
            format!("{fd}:{flags:x}:{}", link.into_os_string().into_vec().escape_ascii())
        })
        .collect()
}

fn fork(child: impl FnOnce()) -> i32 {
    match unsafe { libc::fork() } {
        0 => {
            child();
            exit(0);
        }
        pid => pid,
    }
}

fn wait(pid: i32) {
    unsafe { libc::waitpid(pid, null_mut(), libc::__WALL) };
}

/// Leaves `dead` zombies to the init, a thousand at a time, and again for each byte on stdin. When stdin closes,
/// COMMAND ends with status 7, and `living` orphans do with status 9.
fn orphans(dead: i32, living: i32) -> ! {
    let mut pipe = [0; 2];
    unsafe { libc::pipe(pipe.as_mut_ptr()) };
    wait(fork(|| {
        for _ in 0..living {
            fork(|| {
                unsafe { libc::close(pipe[1]) };
                unsafe { libc::read(pipe[0], [0_u8; 1].as_mut_ptr().cast(), 1) };
                exit(9);
            });
        }
    }));
    loop {
        for _ in 0..dead / 1_000 {
            wait(fork(|| (0..1_000).for_each(|_| zombie_child())));
        }
        say("ready");
        if !read_stdin() {
            exit(7);
        }
    }
}

/// A child that ends at once, and is not waited for. It borrows our memory meanwhile: 20 times faster than a copy.
fn zombie_child() {
    extern "C" fn end(_: *mut libc::c_void) -> libc::c_int {
        exit(9)
    }
    let mut stack = [0_u128; 256];
    let top = stack.as_mut_ptr_range().end;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    unsafe { libc::clone(end, top.cast(), flags, null_mut()) };
}

/// Leaves a process without its parent, which says who adopted it, then every signal that comes. COMMAND ends when its
/// stdin closes.
fn orphan() -> ! {
    sys::set_mask(u64::MAX);
    wait(fork(|| {
        let parent = unsafe { libc::getpid() };
        fork(|| {
            while unsafe { libc::getppid() } == parent {
                std::thread::yield_now();
            }
            let (pid, adopter) = unsafe { (libc::getpid(), libc::getppid()) };
            say(&format!("{pid} adopted by {adopter}"));
            report(None, None);
        });
    }));
    read_stdin();
    exit(7)
}

/// Becomes another user when it is told to; then as `report`.
fn user(last: Option<i32>, status: Option<i32>) -> ! {
    say("ready");
    read_stdin();
    let _ = sys::become_user(54_320);
    report(last, status)
}

/// Waits for a byte or the end; says whether a byte has come.
fn read_stdin() -> bool {
    unsafe { libc::read(0, [0_u8; 1].as_mut_ptr().cast(), 1) == 1 }
}

/// COMMAND and a child of its own, as a shell script has them, both with all signals blocked.
fn pair() -> ! {
    sys::set_mask(u64::MAX);
    fork(|| {
        say("ready");
        sleep();
    });
    sleep()
}

/// Stops, as a debugger or ^Z does it.
fn stop() -> ! {
    say("ready");
    raise(libc::SIGSTOP)
}

/// Closes the fd that it was given, and lives on.
fn close(fd: i32) -> ! {
    unsafe { libc::close(fd) };
    say("ready");
    sleep()
}

/// The terminal as COMMAND finds it.
fn terminal() -> String {
    let (pid, group, session) = unsafe { (libc::getpid(), libc::getpgrp(), libc::getsid(0)) };
    let foreground = sys::foreground(&0) == group;
    let list = [(group == pid, "own group"), (session == pid, "own session"), (foreground, "foreground")];
    list.iter().filter(|(is, _)| *is).map(|(_, what)| *what).collect::<Vec<_>>().join(", ")
}

/// Writes its arguments as it got them.
fn copy_arguments() {
    let bytes = fs::read("/proc/self/cmdline").unwrap_or_default();
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        match unsafe { libc::write(1, rest.as_ptr().cast(), rest.len()) } {
            count @ 1.. => rest = &rest[count.unsigned_abs()..],
            _ => exit(98),
        }
    }
}

/// Has a zombie of its own, which is nobody else's to reap.
fn zombie() -> ! {
    zombie_child();
    say("ready");
    sleep()
}
