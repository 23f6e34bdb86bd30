//! Network namespaces, the veth between them, and istio-init's rules.

use crate::{CLIENT_V4, CLIENT_V6, POD_V4, POD_V6};
use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, setns, unshare};
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

/// A network namespace without a name: it goes when the last process and descriptor in it goes.
#[derive(Debug)]
pub(crate) struct Netns(Arc<File>);

impl Netns {
    pub(crate) fn new() -> Result<Self> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).context("cannot make a network namespace: see scripts/test")?;
            File::open("/proc/thread-self/ns/net").context("/proc/thread-self/ns/net")
        };
        let netns = Self(Arc::new(thread::spawn(make).join().unwrap()?));
        netns.batch("link set lo up\n")?;
        Ok(netns)
    }

    /// For a thread that wants to live inside.
    pub(crate) fn file(&self) -> Arc<File> {
        Arc::clone(&self.0)
    }

    /// Runs `f` in a thread inside the namespace. Threads and processes that it starts stay there.
    pub(crate) fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&*self.0, CloneFlags::CLONE_NEWNET).expect("setns");
            f()
        };
        thread::scope(|s| s.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs a program inside with `input`; an exit status other than 0 is an error that quotes its stderr.
    pub(crate) fn command(&self, program: &str, args: &[&str], input: &str) -> Result<()> {
        feed(program, args, input, |command| self.run(|| command.spawn()))
    }

    fn batch(&self, lines: &str) -> Result<()> {
        self.command("ip", &["-batch", "-"], lines)
    }
}

/// Runs a program that `spawn` starts, gives it `input`, and quotes its stderr where it fails.
fn feed(
    program: &str,
    args: &[&str],
    input: &str,
    spawn: impl FnOnce(&mut Command) -> std::io::Result<Child>,
) -> Result<()> {
    let mut command = Command::new(program);
    // Debian keeps these out of a plain user's PATH, and su keeps that PATH.
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    command.args(args).env("PATH", path);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let missing = || format!("{program} cannot be started: scripts/test installs what is needed");
    let mut child = spawn(&mut command).with_context(missing)?;
    // A program that fails before it reads its input has said why on stderr.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let out = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&out.stderr);
    ensure!(out.status.success(), "{program} {args:?}: {}: {said}\ninput:\n{input}", out.status);
    Ok(())
}

/// Joins the Pod and its clients by a veth that is called eth0 on both ends.
pub(crate) fn join(pod: &Netns, client: &Netns) -> Result<()> {
    let pid = std::process::id();
    let fd = client.0.as_raw_fd();
    // ip names a namespace by a path or by a process; ours have no name but a descriptor.
    let peer = format!("/proc/{pid}/fd/{fd}");
    pod.command("ip", &["link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", &peer], "")?;
    let up =
        |v4, v6| format!("addr add {v4}/24 dev eth0\naddr add {v6}/64 dev eth0 nodad\nlink set eth0 up\n");
    client.batch(&up(CLIENT_V4, CLIENT_V6))?;
    // Envoy's connections to the application come from 127.0.0.6 and ::6; only the latter must be made.
    pod.batch(&(up(POD_V4, POD_V6) + "addr add ::6/128 dev lo nodad\n"))
}

/// istio-init's chains for both families: inbound to 15006, outbound to 15001.
pub(crate) fn redirect(pod: &Netns) -> Result<()> {
    pod.command("iptables-restore", &["--wait"], &rules("127.0.0.1/32", "127.0.0.6/32"))?;
    pod.command("ip6tables-restore", &["--wait"], &rules("::1/128", "::6/128"))
}

/// What the container istio-init does: the same rules in its own namespace, for which `NET_ADMIN` is enough.
pub fn istio_iptables() -> Result<()> {
    let restore = |program, rules: &str| feed(program, &["--wait"], rules, Command::spawn);
    restore("iptables-restore", &rules("127.0.0.1/32", "127.0.0.6/32"))?;
    restore("ip6tables-restore", &rules("::1/128", "::6/128"))
}

/// What istio-iptables makes of `-p 15001 -z 15006 -u 1337 -g 1337 -m REDIRECT -i * -b * -d 15090,15021,15020`.
fn rules(loopback: &str, envoy_source: &str) -> String {
    let mut rules = "*nat\n".to_owned();
    for chain in ["INBOUND", "REDIRECT", "IN_REDIRECT", "OUTPUT"] {
        writeln!(rules, ":ISTIO_{chain} - [0:0]").unwrap();
    }
    rules += "-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001\n\
              -A ISTIO_IN_REDIRECT -p tcp -j REDIRECT --to-ports 15006\n\
              -A PREROUTING -p tcp -j ISTIO_INBOUND\n";
    for port in [15008, 15090, 15021, 15020] {
        writeln!(rules, "-A ISTIO_INBOUND -p tcp --dport {port} -j RETURN").unwrap();
    }
    rules += "-A ISTIO_INBOUND -p tcp -j ISTIO_IN_REDIRECT\n-A OUTPUT -p tcp -j ISTIO_OUTPUT\n";
    writeln!(rules, "-A ISTIO_OUTPUT -o lo -s {envoy_source} -j RETURN").unwrap();
    for owner in ["--uid-owner 1337", "--gid-owner 1337"] {
        let own = format!("-m owner {owner}");
        writeln!(
            rules,
            "-A ISTIO_OUTPUT -o lo ! -d {loopback} -p tcp ! --dport 15008 {own} -j ISTIO_IN_REDIRECT"
        )
        .unwrap();
        writeln!(rules, "-A ISTIO_OUTPUT -o lo -m owner ! {owner} -j RETURN").unwrap();
        writeln!(rules, "-A ISTIO_OUTPUT {own} -j RETURN").unwrap();
    }
    writeln!(rules, "-A ISTIO_OUTPUT -d {loopback} -j RETURN\n-A ISTIO_OUTPUT -j ISTIO_REDIRECT\nCOMMIT")
        .unwrap();
    rules
}

/// Takes the Pod's veth away; what the kernel had not delivered by then is lost.
pub(crate) fn part(pod: &Netns) -> Result<()> {
    pod.command("ip", &["link", "del", "eth0"], "")
}

/// Packets to `port` on the loopback are lost, or answered by a reset.
pub(crate) fn wall_off(pod: &Netns, port: u16, refuse: bool) -> Result<()> {
    let verdict = if refuse { "REJECT --reject-with tcp-reset" } else { "DROP" };
    for program in ["iptables-restore", "ip6tables-restore"] {
        let rules = format!("*filter\n-A INPUT -i lo -p tcp --dport {port} -j {verdict}\nCOMMIT\n");
        pod.command(program, &["--wait", "--noflush"], &rules)?;
    }
    Ok(())
}

/// Whoever connects to `port` on the loopback reaches `other`.
pub(crate) fn redirect_port(pod: &Netns, port: u16, other: u16) -> Result<()> {
    let rule = format!("-I OUTPUT -o lo -p tcp -d 127.0.0.1 --dport {port} -j REDIRECT --to-ports {other}");
    pod.command("iptables-restore", &["--wait", "--noflush"], &format!("*nat\n{rule}\nCOMMIT\n"))
}

/// The first `count` SYNs to `port` are lost. The bucket of the match holds as many and is not filled again in time.
pub(crate) fn drop_syns(client: &Netns, port: u16, count: u32) -> Result<()> {
    let rule =
        format!("-A INPUT -p tcp --dport {port} --syn -m limit --limit 1/day --limit-burst {count} -j DROP");
    client.command("iptables-restore", &["--wait", "--noflush"], &format!("*filter\n{rule}\nCOMMIT\n"))
}

/// From now on nothing passes between the client's `port` and the Pod: a client that vanished without a FIN.
pub(crate) fn silence(client: &Netns, port: u16) -> Result<()> {
    let rules = format!(
        "*filter\n-A INPUT -p tcp --dport {port} -j DROP\n-A OUTPUT -p tcp --sport {port} -j DROP\nCOMMIT\n"
    );
    for program in ["iptables-restore", "ip6tables-restore"] {
        client.command(program, &["--wait", "--noflush"], &rules)?;
    }
    Ok(())
}
