//! What this test binary does when it is started again as COMMAND, before Rust's start-up: a Rust program would have
//! changed dispositions and fds by `main`.
#![allow(clippy::undocumented_unsafe_blocks, reason = "plain system calls with numbers")]

use std::env;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::sys::{self, libc};

#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = before_main;

extern "C" fn before_main() {
    let arguments: Vec<_> = env::args_os().collect();
    let Some(role) = arguments.get(1).and_then(|role| role.to_str()?.strip_prefix("child:")) else { return };
    let number = |index: usize| {
        arguments.get(2 + index).and_then(|argument| argument.to_str()?.parse::<i32>().ok())
    };
    match role {
        "ready" => {
            say("ready");
            sleep();
        }
        "report" => report(number(0), number(1)),
        "exit" => exit(number(0).unwrap_or(0)),
        "raise" => raise(number(0).unwrap_or(0)),
        "state" => say(&given()),
        other => crate::reaping::role(other, &number) .or_else(|| crate::terminal::role(other, &number)).or_else(|| crate::inherit::role(other, &number)).unwrap_or_else(|| exit(99)),
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
    unsafe { libc::write(1, line.as_ptr().cast(), line.len()) };
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
    for key in ["Name", "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd", "CapInh", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"] {
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).unwrap_or("?");
        lines.push(format!("{key}: {}", value.trim()));
    }
    for file in ["limits", "environ", "cmdline", "oom_score_adj", "timerslack_ns", "personality", "coredump_filter", "comm"] {
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
