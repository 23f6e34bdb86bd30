//! A stand-in for Istio's pilot-agent: `pilot-agent proxy sidecar …` runs Envoy and stops it as the real one does.
//!
//! `TERMINATION_DRAIN_DURATION_SECONDS`, `EXIT_ON_ZERO_ACTIVE_CONNECTIONS` and `MINIMUM_DRAIN_DURATION` as Istio has
//! them. `POD_WITHOUT_DRAIN=true` makes it one from before Istio 1.21, `POD_DRAIN_STRATEGY=gradual` gives Envoy its own
//! default. `POD_INBOUND=8080=127.0.0.1:8080,…`, `POD_TCP_PORT=8090` and `POD_TLS_PORT=9443` stand for what the control
//! plane would say. With `POD_NONSENSE=true` whoever connects to 15053 is told nonsense: the fixture redirects other
//! ports there.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, pthread_sigmask};
use nix::unistd::Pid;
use pod::envoy::Bootstrap;
use pod::{NONSENSE, http};
use std::io::{self, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

const ADMIN: ([u8; 4], u16) = ([127, 0, 0, 1], 15000);
/// Of a request to Envoy's admin.
const TIMEOUT: Duration = Duration::from_secs(1);

enum Event {
    Signal,
    /// POST /drain.
    Drain,
    /// POST /quitquitquit.
    Quit,
    EnvoyGone,
}

fn main() -> ExitCode {
    match agent() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pilot-agent: {error:#}");
            ExitCode::from(255)
        }
    }
}

fn agent() -> Result<()> {
    // Blocked before there is another thread, so that every thread has it so and only the one below takes them.
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.add(Signal::SIGINT);
    let mut before = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&stop), Some(&mut before))?;

    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|a| a == "istio-iptables") {
        return pod::istio_iptables();
    }
    ensure!(args.first().is_some_and(|a| a == "proxy"), "unknown command {args:?}");
    let (events, inbox) = channel();
    let sender = events.clone();
    // Goes on after the first: later ones are swallowed.
    thread::spawn(move || {
        while stop.wait().is_ok() {
            if sender.send(Event::Signal).is_err() {
                break;
            }
        }
    });
    serve(TcpListener::bind("[::]:15020").context("15020")?, events.clone());
    serve(TcpListener::bind("127.0.0.1:15004").context("15004")?, events.clone());
    if is_set("POD_NONSENSE") {
        talk_nonsense(TcpListener::bind(("127.0.0.1", NONSENSE)).context("15053")?);
    }
    let envoy = start_envoy(before)?;
    let pid = Pid::from_raw(envoy.id().cast_signed());
    watch(envoy, events);

    let mut drained = false;
    for event in inbox {
        match event {
            Event::Drain => {
                drain("/drain_listeners?inboundonly&graceful&skip_exit");
                drained = true;
            }
            Event::Signal if drained => break,
            Event::Signal => {
                eprintln!("pilot-agent: draining");
                drain("/drain_listeners?inboundonly&graceful");
                if is_set("EXIT_ON_ZERO_ACTIVE_CONNECTIONS") {
                    wait_for_zero()?;
                } else {
                    thread::sleep(seconds("TERMINATION_DRAIN_DURATION_SECONDS")?);
                }
                break;
            }
            Event::Quit => break,
            Event::EnvoyGone => {
                eprintln!("pilot-agent: Envoy has exited");
                return Ok(());
            }
        }
    }
    eprintln!("pilot-agent: killing Envoy");
    let _ = kill(pid, Signal::SIGKILL);
    Ok(())
}

fn is_set(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| value == "true")
}

/// Both of Istio's durations are 5 s unless said otherwise.
fn seconds(name: &str) -> Result<Duration> {
    let seconds = std::env::var(name).unwrap_or_else(|_| "5".to_owned());
    Ok(Duration::from_secs(seconds.trim_end_matches('s').parse().with_context(|| name.to_owned())?))
}

/// Without a limit. A request that fails, or an answer without a count, says nothing.
fn wait_for_zero() -> Result<()> {
    thread::sleep(seconds("MINIMUM_DRAIN_DURATION")?);
    loop {
        thread::sleep(Duration::from_secs(1));
        match active_connections() {
            Some(0) => return Ok(()),
            Some(count) => eprintln!("pilot-agent: {count} active connections"),
            None => eprintln!("pilot-agent: the number of active connections is unknown"),
        }
    }
}

/// The sum over Envoy's listeners, without its own affairs.
fn active_connections() -> Option<u64> {
    let answer = http::fetch(ADMIN.into(), "/stats?usedonly&filter=downstream_cx_active$", TIMEOUT).ok()?;
    let text = String::from_utf8(answer.body).ok()?;
    let counted = |name: &str| {
        let others = ["worker_", "envoy_internal_", "admin", "_15021", "_15090"];
        name.starts_with("listener.") && !others.iter().any(|other| name.contains(other))
    };
    let lines = text.lines().filter_map(|line| line.split_once(": ")).filter(|(name, _)| counted(name));
    let counts: Vec<u64> = lines.filter_map(|(_, count)| count.parse().ok()).collect();
    (!counts.is_empty()).then(|| counts.iter().sum())
}

fn drain(path: &str) {
    match http::call("POST", ADMIN.into(), path, TIMEOUT) {
        Ok(200) => {}
        answer => eprintln!("pilot-agent: {path}: {answer:?}"),
    }
}

fn start_envoy(mask: SigSet) -> Result<Child> {
    let mut bootstrap = Bootstrap::default();
    if let Ok(inbound) = std::env::var("POD_INBOUND") {
        for pair in inbound.split(',') {
            let (port, endpoint) = pair.split_once('=').context("POD_INBOUND")?;
            bootstrap.inbound.push((port.parse()?, endpoint.parse()?));
        }
    }
    if let Ok(port) = std::env::var("POD_TCP_PORT") {
        bootstrap.tcp_ports.push(port.parse()?);
    }
    if let Ok(port) = std::env::var("POD_TLS_PORT") {
        bootstrap.tls_port = Some(port.parse()?);
    }
    bootstrap.access_log = is_set("POD_ACCESS_LOG");
    let mut envoy = Command::new("/usr/local/bin/envoy");
    envoy.arg("--config-yaml").arg(bootstrap.config().to_string());
    // Istio's own flags, as far as they matter without discovery.
    let strategy = std::env::var("POD_DRAIN_STRATEGY").unwrap_or_else(|_| "immediate".to_owned());
    envoy.args(["--drain-time-s", "45", "--drain-strategy", &strategy, "--disable-hot-restart"]);
    envoy.args(["--log-level", "warning", "--concurrency", "2", "--file-flush-interval-msec", "1000"]);
    // SAFETY: sigprocmask is async-signal-safe.
    unsafe {
        envoy.pre_exec(move || Ok(pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)?));
    }
    envoy.spawn().context("cannot start Envoy")
}

/// Reaps Envoy, and nothing else, as the real one.
fn watch(mut envoy: Child, events: Sender<Event>) {
    thread::spawn(move || {
        let _ = envoy.wait();
        let _ = events.send(Event::EnvoyGone);
    });
}

fn serve(listener: TcpListener, events: Sender<Event>) {
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let events = events.clone();
            thread::spawn(move || answer(stream, &events));
        }
    });
}

/// Neither HTTP nor an end of it.
fn talk_nonsense(listener: TcpListener) {
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                stream.write_all(b"HTTP/1.1 ")?;
                stream.write_all(&[0xff; 4096])?;
                // Until the other end has enough of it.
                io::copy(&mut stream, &mut io::sink())
            });
        }
    });
}

fn answer(stream: TcpStream, events: &Sender<Event>) -> std::io::Result<()> {
    let local = stream.peer_addr()?.ip().to_canonical().is_loopback();
    let mut to = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    loop {
        let request = http::read(&mut from)?;
        let (status, event) = match request.request() {
            ("GET", "/healthz/ready") => (readiness(), None),
            (_, "/drain") if is_set("POD_WITHOUT_DRAIN") => ("404 Not Found", None),
            (_, "/quitquitquit" | "/drain") if !local => ("403 Forbidden", None),
            ("POST", "/quitquitquit") => ("200 OK", Some(Event::Quit)),
            ("POST", "/drain") => ("200 OK", Some(Event::Drain)),
            (_, "/quitquitquit" | "/drain") => ("405 Method Not Allowed", None),
            _ => ("404 Not Found", None),
        };
        // Before the answer: who has it may rely on a signal that follows to come later.
        if let Some(event) = event {
            let _ = events.send(event);
        }
        http::respond(&mut to, status, b"")?;
        if request.close {
            return Ok(());
        }
    }
}

fn readiness() -> &'static str {
    let admin: SocketAddr = ADMIN.into();
    let ready = http::call("GET", admin, "/ready", TIMEOUT).is_ok_and(|status| status == 200);
    if ready { "200 OK" } else { "503 Service Unavailable" }
}
