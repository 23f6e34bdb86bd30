//! What one look costs, and what a hold costs: inside the Pod.

use crate::cpu::{Samples, of_command, per_run, wait};
use crate::pod::Pod;
use anyhow::{Context, Result, ensure};
use outlast::hold::Sight;
use outlast::pod::kernel::{Source, System};
use outlast::pod::owners::{Kinds, Rules};
use outlast::pod::snapshot::Observer;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The body of the loop that outlast replaces.
const NETSTAT: &str =
    "test $(netstat -plunt | grep tcp | egrep -v 'envoy|pilot-agent' | wc -l | xargs) -ne 0";
/// What is looked at in one process at a time; a sample is of all of them.
const LOOKS: u32 = 100;
const DEAR_LOOKS: u32 = 10;

/// Prints the samples of one look by each of the peers, in turn.
pub(crate) fn looks(connections: u32, rounds: u32) -> Result<()> {
    let _pod = Pod::start(connections, true)?;
    let mut dump = Dump::open()?;
    ensure!(dump.listeners() > 20 * 72, "the kernel says nothing of the listeners");
    let mut diag = warm(observer(Source::Diag))?;
    let mut proc = warm(observer(Source::Proc))?;
    let mut complete = warm(connections_only(Source::Diag))?;
    let mut complete_proc = warm(connections_only(Source::Proc))?;
    let mut samples: Vec<(&str, Samples)> =
        ["dump", "diag", "proc", "diag-complete", "proc-complete", "ss", "netstat"]
            .map(|name| (name, Samples::default()))
            .into();
    for _ in 0..rounds {
        for (name, samples) in &mut samples {
            samples.push(match *name {
                "dump" => per_run(LOOKS, || {
                    dump.listeners();
                }),
                "diag" => look(&mut diag, LOOKS),
                "proc" => look(&mut proc, DEAR_LOOKS),
                "diag-complete" => look(&mut complete, DEAR_LOOKS),
                "proc-complete" => look(&mut complete_proc, DEAR_LOOKS),
                "ss" => of_command(Command::new("ss").arg("-ltnpH"))?,
                _ => of_command(Command::new("sh").args(["-c", NETSTAT]))?,
            });
        }
    }
    for (name, samples) in samples {
        println!("{name} {}", samples.to_text());
    }
    Ok(())
}

/// `count` looks and nothing else, to be counted by callgrind.
pub(crate) fn count(source: &str, connections: u32, count: u32) -> Result<()> {
    let _pod = Pod::start(connections, true)?;
    let source = if source == "diag" { Source::Diag } else { Source::Proc };
    let mut observer = warm(observer(source))?;
    look(&mut observer, count);
    Ok(())
}

type Looks = Observer<System>;

fn observer(source: Source) -> Looks {
    Observer::new(System::open(source), rules(true), None)
}

/// Where no listener holds, all connections are looked at.
fn connections_only(source: Source) -> Looks {
    Observer::new(System::open(source), rules(false), None)
}

fn rules(listeners: bool) -> Rules {
    Rules {
        hold: Kinds { listeners, connections: true, undelivered: true },
        proxy: vec!["envoy".into(), "pilot-agent".into()],
        ignore_ports: Vec::new(),
        ignore_uids: Vec::new(),
    }
}

/// The first looks learn whose the sockets are.
fn warm(mut observer: Looks) -> Result<Looks> {
    look(&mut observer, 5);
    ensure!(observer.view().trouble.is_none(), "{:?}", observer.view().trouble);
    ensure!(observer.view().proxies.len() == 2, "{:?}", observer.view().proxies);
    Ok(observer)
}

fn look(observer: &mut Looks, count: u32) -> f64 {
    per_run(count, || {
        assert_ne!(observer.look(Duration::ZERO).sight(), Sight::Unknown);
    })
}

/// A bare kernel dump of the listeners of both families: the limit of what a look can cost.
struct Dump {
    socket: i32,
    buffer: Vec<u8>,
}

impl Dump {
    fn open() -> Result<Dump> {
        // SAFETY: plain numbers.
        let socket = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_SOCK_DIAG) };
        ensure!(socket >= 0, "no netlink");
        Ok(Dump { socket, buffer: vec![0; 32 * 1024] })
    }

    /// How many bytes the kernel answers with.
    fn listeners(&mut self) -> usize {
        [libc::AF_INET, libc::AF_INET6].map(|family| self.family(family)).iter().sum()
    }

    fn family(&mut self, family: i32) -> usize {
        // struct nlmsghdr, then struct inet_diag_req_v2 with the states' bits: LISTEN is 10.
        let mut request = [0_u8; 72];
        request[0..4].copy_from_slice(&72_u32.to_ne_bytes());
        request[4..6].copy_from_slice(&20_u16.to_ne_bytes());
        request[6..8].copy_from_slice(&0x301_u16.to_ne_bytes());
        request[16] = u8::try_from(family).unwrap_or(0);
        request[17] = 6;
        request[20..24].copy_from_slice(&(1_u32 << 10).to_ne_bytes());
        let mut sum = 0;
        // SAFETY: both buffers outlive the calls, and their own lengths are passed.
        unsafe {
            libc::send(self.socket, request.as_ptr().cast(), request.len(), 0);
            loop {
                let read = libc::recv(self.socket, self.buffer.as_mut_ptr().cast(), self.buffer.len(), 0);
                let read = usize::try_from(read).unwrap_or(0);
                sum += read;
                // NLMSG_DONE is 3, and comes alone.
                if read < 16 || self.buffer[4] == 3 {
                    return sum;
                }
            }
        }
    }
}

/// Prints the CPU seconds of holds of this length, all beside each other.
pub(crate) fn holds(outlast: &Path, seconds: u32, connections: u32, listen: bool) -> Result<()> {
    let _pod = Pod::start(connections, listen)?;
    let hold = |source: &str| {
        let mut command = Command::new(outlast);
        command.args([
            "prestop",
            "--exit-zero",
            &format!("--timeout={seconds}s"),
            &format!("--source={source}"),
        ]);
        command
    };
    // As many rounds as the loop makes in that time; it would go on for ever.
    let netstat = format!("i=0; while {NETSTAT} && [ $i -lt {seconds} ]; do sleep 1; i=$((i+1)); done");
    let mut all = vec![("diag", hold("diag")), ("proc", hold("proc"))];
    if listen {
        let mut sh = Command::new("sh");
        sh.args(["-c", &netstat]);
        all.push(("netstat", sh));
    }
    let mut running = Vec::new();
    for (name, command) in &mut all {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        running.push((*name, command.spawn().with_context(|| format!("{command:?}"))?));
    }
    for (name, child) in running {
        let (status, cpu) = wait(&child)?;
        ensure!(status == 0 || name == "netstat", "{name}: status {status}");
        println!("{name} {cpu:e}");
    }
    Ok(())
}
