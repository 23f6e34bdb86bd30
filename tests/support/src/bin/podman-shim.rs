//! What `shim` does, by podman: the fixture's Pod as a Pod of podman's, with runc, in images, and under every
//! restriction that Istio puts on a sidecar. `POD_SHIM=podman-shim` chooses it; scripts/test-images makes what it needs.
//!
//! The containers of one network namespace are one Pod. The sidecar's image is the proxyv2 of Dockerfile.musl, run by
//! its own entrypoint where that is what is asked for; the fixture's programs are in the images and not bound in.

use anyhow::{Context, Result, bail, ensure};
use lexopt::{Arg, ValueExt};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use std::fs;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// What starts the proxy in the image; an argv that begins so is the image's own.
const ENTRYPOINT: [&str; 4] = ["outlast", "run", "--", "pilot-agent"];
/// Reached by a failure only.
const LONG: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Options {
    uid: u32,
    read_only: bool,
    join: Option<i32>,
    command: Vec<String>,
}

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let verb = args.next().context("run or exec")?.string()?;
    let options = parse(lexopt::Parser::from_args(args))?;
    match verb.as_str() {
        "run" => run(&options),
        "exec" => exec(&options),
        _ => bail!("run or exec"),
    }
}

fn parse(mut parser: lexopt::Parser) -> Result<Options> {
    let mut options = Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("uid") => options.uid = parser.value()?.parse()?,
            Arg::Long("read-only") => options.read_only = true,
            Arg::Long("pid") => options.join = Some(parser.value()?.parse()?),
            Arg::Long("bind") => drop(parser.value()?),
            Arg::Value(program) => {
                let rest = parser.raw_args()?.map(ValueExt::string).collect::<Result<Vec<_>, _>>()?;
                options.command = [vec![program.string()?], rest].concat();
            }
            _ => return Err(arg.unexpected().into()),
        }
    }
    Ok(options)
}

/// podman's own files, and ours: the name of each container by the process id of its PID 1.
fn home() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/images")
}

fn podman() -> Command {
    let home = home();
    let mut podman = Command::new("podman");
    podman.env("CONTAINERS_CONF", home.join("containers.conf"));
    podman.arg("--root").arg(home.join("storage")).arg("--runroot").arg(home.join("run"));
    podman
}

/// Our environment is the container's.
fn pass_environment(podman: &mut Command) {
    for (name, value) in std::env::vars().filter(|(name, _)| name != "PATH") {
        podman.arg(format!("--env={name}={value}"));
    }
}

fn run(options: &Options) -> Result<()> {
    let pod = pod()?;
    let me = std::process::id();
    let name = format!("outlast-{me}");
    let pidfile = home().join(format!("{name}.pid"));
    let mut run = podman();
    run.args(["run", "--quiet", "--rm", "--pull=never", "--log-driver=none", "--attach=stderr"]);
    run.arg(format!("--pod={pod}")).arg(format!("--name={name}"));
    // By its path, as kubelet's runtimes do; we live as long as the container, and so does the path.
    run.arg(format!("--network=ns:/proc/{me}/ns/net"));
    run.arg(format!("--pidfile={}", pidfile.display())).arg(format!("--user={0}:{0}", options.uid));
    // The seccomp profile is the default one, for none is named.
    run.args(["--cap-drop=all", "--security-opt=no-new-privileges"]);
    if options.read_only {
        // Without the tmpfs that podman adds for convenience, and Kubernetes does not.
        run.args(["--read-only", "--read-only-tmpfs=false"]);
    }
    pass_environment(&mut run);
    let words: Vec<_> = options.command.iter().map(String::as_str).collect();
    if let Some(args) = words.strip_prefix(&ENTRYPOINT) {
        run.arg("localhost/outlast-proxyv2").args(args);
    } else {
        let (program, args) = words.split_first().context("no command")?;
        let image = if options.read_only { "outlast-proxyv2" } else { "outlast-application" };
        run.arg(format!("--entrypoint={program}")).arg(format!("localhost/{image}")).args(args);
    }
    let mut client = run.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("podman")?;
    let pid = pid_1(&pidfile, &mut client)?;
    restricted(pid, options)?;
    fs::write(home().join(format!("{pid}.name")), &name)?;
    watch(pid, client)
}

fn exec(options: &Options) -> Result<()> {
    let pid = options.join.context("--pid")?;
    let name = fs::read_to_string(home().join(format!("{pid}.name"))).context("no such container")?;
    let mut exec = podman();
    exec.arg("exec");
    pass_environment(&mut exec);
    exec.arg(name).args(&options.command);
    let client = exec.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("podman")?;
    let client_pid = i32::try_from(client.id())?;
    watch(client_pid, client)
}

/// The Pod of our network namespace; the first container makes it.
fn pod() -> Result<String> {
    let name = format!("outlast-{}", fs::metadata("/proc/self/ns/net")?.ino());
    let exists = podman().args(["pod", "exists", &name]).status()?.success();
    if !exists {
        let mut create = podman();
        create.args(["pod", "create", "--infra-image=localhost/outlast-pause", "--infra-command=/pause"]);
        create.args(["--network=none", "--share=ipc,uts", "--name", &name]);
        let made = create.stdout(Stdio::null()).status()?;
        ensure!(made.success(), "podman cannot make a Pod");
    }
    Ok(name)
}

/// Waits until the container's PID 1 has been executed: before that the process is runc's.
fn pid_1(pidfile: &Path, client: &mut Child) -> Result<i32> {
    let deadline = Instant::now() + LONG;
    loop {
        let pid = fs::read_to_string(pidfile).ok().and_then(|text| text.trim().parse::<i32>().ok());
        let comm = pid.and_then(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).ok());
        if let (Some(pid), Some(comm)) = (pid, comm)
            && !comm.starts_with("runc")
        {
            return Ok(pid);
        }
        if let Some(status) = client.try_wait()? {
            bail!("podman run: {status}");
        }
        ensure!(Instant::now() < deadline, "the container does not start");
        sleep(Duration::from_millis(2));
    }
}

/// What the flags asked for is what the kernel has: a runtime that ignored one would prove nothing.
fn restricted(pid: i32, options: &Options) -> Result<()> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let is = |name: &str, value: &str| {
        let mut lines = status.lines().filter_map(|line| line.split_once(":\t"));
        lines.any(|(n, v)| n == name && v.split('\t').all(|word| word == value))
    };
    let none = "0000000000000000";
    ensure!(is("Uid", &options.uid.to_string()) && is("Gid", &options.uid.to_string()), "another uid");
    ensure!(is("CapEff", none) && is("CapPrm", none) && is("CapBnd", none), "capabilities are left");
    ensure!(is("NoNewPrivs", "1"), "no_new_privs is not set");
    ensure!(is("Seccomp", "2"), "there is no seccomp filter");
    if options.read_only {
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        ensure!(mounts.any(|m| m[4] == "/" && m[5].starts_with("ro")), "the root can be written to");
    }
    Ok(())
}

/// Reports the end of `pid`, with the status that its client has of it; the end of stdin kills it.
fn watch(pid: i32, mut client: Child) -> Result<()> {
    println!("pid {pid}");
    let stdin = std::io::stdin();
    let ended = pidfd(pid)?;
    let mut fds =
        [PollFd::new(ended.as_fd(), PollFlags::POLLIN), PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::NONE)?;
    if fds[0].any() != Some(true) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        poll(&mut [PollFd::new(ended.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
    }
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)?;
    let code = client.wait()?.code().unwrap_or(128 + Signal::SIGKILL as i32);
    println!("exit {} code {code}", now.tv_sec() * 1_000_000_000 + now.tv_nsec());
    Ok(())
}

fn pidfd(pid: i32) -> Result<OwnedFd> {
    // SAFETY: a system call on numbers.
    let fd = nix::errno::Errno::result(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}
