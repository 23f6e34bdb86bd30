//! A Pod to look at: namespaces of its own, an application, and processes named `envoy` and `pilot-agent` that hold
//! half of the connections.

use crate::cpu::now;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::{env, fs};

/// A sidecar's ports; the rest of the 20 listeners are the application's.
const ENVOY_PORTS: [u16; 7] = [15000, 15001, 15004, 15006, 15021, 15053, 15090];
const AGENT_PORTS: [u16; 1] = [15020];
const APPLICATION_PORTS: std::ops::Range<u16> = 8000..8012;
const INBOUND: u16 = 15006;
const APPLICATION: libc::uid_t = 1000;

/// A command that becomes PID 1 of a container with a network of its own, where lo is up.
pub(crate) fn in_namespaces(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"])
        .args(["ip link set lo up && exec \"$0\" \"$@\""])
        .arg(program)
        .args(args);
    command
}

/// This program under another name, which the kernel takes for the process's.
pub(crate) fn named(name: &str) -> Result<PathBuf> {
    let dir = env::temp_dir().join("outlast-bench");
    fs::create_dir_all(&dir)?;
    let link = dir.join(name);
    let own = env::current_exe()?;
    if fs::read_link(&link).ok().as_deref() != Some(&own) {
        let _ = fs::remove_file(&link);
        // A run beside this one may have been faster.
        let _ = std::os::unix::fs::symlink(&own, &link);
    }
    Ok(link)
}

/// A process of the Pod; ends with it.
pub(crate) struct Helper(pub(crate) Child);

impl Helper {
    fn start(name: &str, args: &[String]) -> Result<Helper> {
        let mut command = Command::new(named(name)?);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut helper = Helper(command.spawn().with_context(|| name.to_owned())?);
        let mut line = String::new();
        BufReader::new(helper.0.stdout.as_mut().context("a pipe")?).read_line(&mut line)?;
        ensure!(line == "ready\n", "{name} is not ready: {line:?}");
        Ok(helper)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The processes of the Pod.
pub(crate) struct Pod {
    _application: Helper,
    _proxy: [Helper; 2],
}

impl Pod {
    /// Starts them: `connections` sockets in all, half of them Envoy's.
    pub(crate) fn start(connections: u32, application_listens: bool) -> Result<Pod> {
        more_files()?;
        let words = |ports: &[u16]| ports.iter().map(ToString::to_string).collect::<Vec<_>>();
        let listen = |ports: &[u16]| [&["listen".to_owned()], &words(ports)[..]].concat();
        let proxy = [
            Helper::start("envoy", &listen(&ENVOY_PORTS))?,
            Helper::start("pilot-agent", &listen(&AGENT_PORTS))?,
        ];
        let ports: Vec<u16> = if application_listens { APPLICATION_PORTS.collect() } else { Vec::new() };
        let application = [&["apply".to_owned(), (connections / 2).to_string()], &words(&ports)[..]].concat();
        Ok(Pod { _application: Helper::start("application", &application)?, _proxy: proxy })
    }
}

fn more_files() -> Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointers are to a limit that outlives the calls.
    let set = unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = 10_000;
        // What valgrind keeps for itself is above that.
        limit.rlim_max = limit.rlim_max.max(10_000);
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit)
    };
    ensure!(set == 0, "no 10,000 files");
    Ok(())
}

fn listen_on(ports: &[&str]) -> Result<Vec<TcpListener>> {
    ports.iter().map(|port| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port.parse()?))?)).collect()
}

/// `envoy` and `pilot-agent`: listen, accept what comes to the inbound port, keep it.
pub(crate) fn listen(ports: &[&str]) -> Result<()> {
    let listeners = listen_on(ports)?;
    println!("ready");
    let mut kept = Vec::new();
    let inbound =
        listeners.iter().find(|listener| listener.local_addr().is_ok_and(|at| at.port() == INBOUND));
    if let Some(inbound) = inbound {
        loop {
            let (mut stream, _) = inbound.accept()?;
            stream.write_all(b"x")?;
            kept.push(stream);
        }
    }
    wait_for_end();
    Ok(())
}

/// `application`: connect, listen, stay; under a uid that is not the proxy's.
pub(crate) fn apply(count: u32, ports: &[&str]) -> Result<()> {
    // SAFETY: a system call on plain numbers, and there is one thread.
    ensure!(unsafe { libc::setuid(APPLICATION) } == 0, "cannot become uid {APPLICATION}");
    let _listeners = listen_on(ports)?;
    let mut kept = Vec::new();
    for _ in 0..count {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, INBOUND))?;
        stream.read_exact(&mut [0])?;
        kept.push(stream);
    }
    println!("ready");
    wait_for_end();
    Ok(())
}

fn wait_for_end() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// COMMAND of the inits: says when it runs, and with `exit` when it ends, else waits for SIGTERM and says when that came.
pub(crate) fn stamp(exit: bool) {
    let started = now().as_nanos();
    if exit {
        println!("{started} {}", now().as_nanos());
        return;
    }
    println!("{started}");
    let mut number = 0;
    // SAFETY: plain system calls on a set that outlives them.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
        println!("ready");
        libc::sigwait(&raw const set, &raw mut number);
    }
    println!("{}", now().as_nanos());
}

/// COMMAND of the inits: `count` orphans that end at one time; says how many seconds it takes until all are reaped.
pub(crate) fn orphans(count: u32) -> Result<()> {
    let (gate, opener) = std::io::pipe()?;
    let (mut pids, reporter) = std::io::pipe()?;
    for _ in 0..count {
        // SAFETY: there is one thread, and the children make system calls only.
        unsafe {
            let parent = libc::fork();
            ensure!(parent != -1, "cannot fork");
            if parent == 0 {
                if libc::fork() == 0 {
                    libc::close(opener.as_raw_fd());
                    let own = libc::getpid().to_ne_bytes();
                    libc::write(reporter.as_raw_fd(), own.as_ptr().cast(), own.len());
                    // Ends when the writer is closed.
                    libc::read(gate.as_raw_fd(), [0_u8].as_mut_ptr().cast(), 1);
                }
                libc::_exit(0);
            }
            libc::waitpid(parent, std::ptr::null_mut(), 0);
        }
    }
    let mut orphans = Vec::new();
    for _ in 0..count {
        let mut pid = [0; 4];
        pids.read_exact(&mut pid)?;
        orphans.push(i32::from_ne_bytes(pid));
    }
    let began = now();
    drop(opener);
    for pid in orphans {
        // SAFETY: signal 0 is none; it only asks for the process.
        while unsafe { libc::kill(pid, 0) } == 0 {
            std::thread::yield_now();
        }
    }
    println!("{}", (now() - began).as_secs_f64());
    Ok(())
}
