//! Starts a container's PID 1, or a process inside a running container, and reports how it went.
//!
//! `shim run [--uid N] [--read-only] [--bind FILE=NAME]… -- COMMAND…` and `shim exec --uid N --pid PID -- COMMAND…`.
//! On stdout: `pid N` (on the host) once COMMAND has been executed, `exit NANOSECONDS code|signal N` (monotonic) when
//! it has ended. The end of stdin kills it: so no container survives the fixture. COMMAND writes to our stderr.

use anyhow::{Context, Result, bail};
use lexopt::{Arg, ValueExt};
use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, Gid, Pid, Uid, fork, pipe2, setgroups, setresgid, setresuid};
use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Where a container finds the programs it was given, as in Istio's image.
const PROGRAMS: &str = "/usr/local/bin";

#[derive(Default)]
struct Options {
    uid: u32,
    read_only: bool,
    binds: Vec<(String, String)>,
    join: Option<i32>,
    command: Vec<OsString>,
}

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let run = match args.next().as_deref().and_then(|verb| verb.to_str()) {
        Some("run") => true,
        Some("exec") => false,
        _ => bail!("run or exec"),
    };
    let options = parse(lexopt::Parser::from_args(args))?;
    if run {
        isolate(&options)?;
    } else {
        join(options.join.context("--pid")?)?;
    }

    let (said, say) = pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let error = become_command(run, &options).unwrap_err();
            let _ = File::from(say).write_all(format!("{error:#}").as_bytes());
            std::process::exit(127);
        }
        ForkResult::Parent { child } => {
            drop(say);
            watch(child, said)
        }
    }
}

fn parse(mut parser: lexopt::Parser) -> Result<Options> {
    let mut options = Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("uid") => options.uid = parser.value()?.parse()?,
            Arg::Long("read-only") => options.read_only = true,
            Arg::Long("pid") => options.join = Some(parser.value()?.parse()?),
            Arg::Long("bind") => {
                let bind = parser.value()?.string()?;
                let (file, name) = bind.split_once('=').context("--bind FILE=NAME")?;
                options.binds.push((file.to_owned(), name.to_owned()));
            }
            Arg::Value(program) => {
                options.command = std::iter::once(program).chain(parser.raw_args()?).collect();
            }
            _ => return Err(arg.unexpected().into()),
        }
    }
    Ok(options)
}

/// The container's namespaces and its file system: the host's, the programs on top.
fn isolate(options: &Options) -> Result<()> {
    let namespaces = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWIPC;
    unshare(namespaces).context("cannot make namespaces")?;
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
    mount(Some("tmpfs"), PROGRAMS, Some("tmpfs"), MsFlags::MS_NOSUID, Some("mode=755")).context(PROGRAMS)?;
    for (file, name) in &options.binds {
        let target = format!("{PROGRAMS}/{name}");
        File::create(&target)?;
        mount(Some(file.as_str()), target.as_str(), none, MsFlags::MS_BIND, none)
            .with_context(|| file.clone())?;
    }
    if options.read_only {
        let attr =
            libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
        // SAFETY: the path is a C string, attr lives through the call and its size is given.
        let rc = unsafe {
            let (at, root, all) = (libc::AT_FDCWD, c"/".as_ptr(), libc::AT_RECURSIVE);
            libc::syscall(libc::SYS_mount_setattr, at, root, all, &raw const attr, size_of_val(&attr))
        };
        nix::errno::Errno::result(rc).context("mount_setattr")?;
    }
    Ok(())
}

fn join(pid: i32) -> Result<()> {
    for (name, kind) in [
        ("net", CloneFlags::CLONE_NEWNET),
        ("pid", CloneFlags::CLONE_NEWPID),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ] {
        let file = File::open(format!("/proc/{pid}/ns/{name}")).context("the container is gone")?;
        setns(file, kind)?;
    }
    Ok(())
}

/// Gives up what a container may not have, and becomes COMMAND. Returns only an error.
fn become_command(first: bool, options: &Options) -> Result<()> {
    if first {
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).context("/proc")?;
    }
    let null = File::open("/dev/null")?;
    // SAFETY: plain system calls on descriptors that are open and on numbers; no memory is involved.
    unsafe {
        libc::dup2(null.as_raw_fd(), 0);
        libc::dup2(2, 1);
        // As container runtimes do: the container's user may open /proc/1/fd/2 again.
        libc::fchown(2, options.uid, options.uid);
        for capability in 0..64 {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0);
        }
    }
    setgroups(&[])?;
    let (gid, uid) = (Gid::from_raw(options.uid), Uid::from_raw(options.uid));
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)?;
    nix::sys::prctl::set_no_new_privs()?;
    let (program, args) = options.command.split_first().context("no command")?;
    Err(Command::new(program).args(args).exec()).with_context(|| program.display().to_string())
}

fn watch(child: Pid, said: OwnedFd) -> Result<()> {
    let mut error = String::new();
    File::from(said).read_to_string(&mut error)?;
    if !error.is_empty() {
        bail!(error);
    }
    println!("pid {child}");
    let stdin = std::io::stdin();
    // No thread: after the unshare this process can have none.
    let ended = pidfd(child)?;
    let mut fds =
        [PollFd::new(ended.as_fd(), PollFlags::POLLIN), PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::NONE)?;
    if fds[1].any() == Some(true) {
        let _ = kill(child, Signal::SIGKILL);
    }
    let status = waitpid(child, None)?;
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    let (kind, number) = match status {
        WaitStatus::Exited(_, code) => ("code", code),
        WaitStatus::Signaled(_, signal, _) => ("signal", signal as i32),
        other => bail!("{other:?}"),
    };
    println!("exit {} {kind} {number}", now.tv_sec() * 1_000_000_000 + now.tv_nsec());
    Ok(())
}

fn pidfd(child: Pid) -> Result<OwnedFd> {
    // SAFETY: a system call on numbers.
    let fd = nix::errno::Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, child.as_raw(), 0) })?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}
