//! `outlast app`: the application's entrypoint.

use std::ffi::OsString;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, socket};

use crate::cli::{OnTimeout, Quit, Settings};
use crate::exit::Exit;
use crate::init::child::Child;
use crate::init::first::Inherited;
use crate::init::signals::{Arrived, Name, Signals};
use crate::init::spawn::replace;
use crate::log::Log;
use crate::poststart::{Ready, wait_until_ready};
use crate::proxy_api::ProxyApi;

/// Where the presence listener may be: below the ephemeral ports, where an application's own bind could meet it.
const PRESENCE_PORTS: std::ops::RangeInclusive<u16> = 15900..=15999;
/// How long each URL is asked to quit the proxy, and how long its end is then waited for.
const QUIT_TIME: Duration = Duration::from_secs(5);
const GONE_TIME: Duration = Duration::from_secs(10);
/// The time between two tries of either.
const PAUSE: Duration = Duration::from_millis(100);

/// Waits for the proxy, runs COMMAND, asks the proxy to quit; returns COMMAND's status.
pub fn app(settings: &Settings, command: Vec<OsString>, log: &Log) -> Exit {
    if settings.disable {
        return replace(&command, Inherited::get()).tell(&command, log);
    }
    let signals = match Signals::take_over(log) {
        Ok(signals) => signals,
        Err(exit) => return exit,
    };
    let exit = start_and_wait(settings, command, &signals, log);
    let success = exit == Exit::Status(0);
    if settings.quit == Quit::Always || (settings.quit == Quit::OnSuccess && success) {
        quit(settings, &signals, log);
    }
    exit
}

fn start_and_wait(settings: &Settings, command: Vec<OsString>, signals: &Signals, log: &Log) -> Exit {
    // What is not for us is COMMAND's, once there is one.
    let mut early = Vec::new();
    let ready = wait_until_ready(settings, log, &mut |time| stop_signal(signals, time, &mut early));
    match ready {
        Ready::Signal(number) => return Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX)),
        Ready::No if settings.on_timeout == OnTimeout::Fail => return Exit::Timeout,
        Ready::No | Ready::Yes => {}
    }
    let presence = if settings.presence { presence(log) } else { None };
    let mut keep = vec![signals.raw()];
    keep.extend(presence.as_ref().map(AsRawFd::as_raw_fd));
    let child = match Child::start(&command, settings.signal_group, &keep, log) {
        Ok(child) => child,
        Err(exit) => return exit,
    };
    drop(command);
    for arrived in early {
        child.pass_on(arrived);
    }
    loop {
        signals.wait(None);
        while let Some(arrived) = signals.next() {
            match arrived.number {
                libc::SIGTERM => child.stop(libc::SIGTERM),
                _ => child.pass_on(arrived),
            }
        }
        if let Some(exit) = child.reap() {
            // The listener closes with this, and not with the proxy's end.
            drop(presence);
            log.info("COMMAND ended", &[("status", &u8::from(exit))]);
            return exit;
        }
    }
}

/// Waits so long, or until a signal comes that would end a process; keeps the others.
fn stop_signal(signals: &Signals, time: Duration, others: &mut Vec<Arrived>) -> Option<i32> {
    let deadline = Instant::now().checked_add(time);
    loop {
        let left = deadline.map_or(time, |deadline| deadline.saturating_duration_since(Instant::now()));
        signals.wait(Some(left));
        while let Some(arrived) = signals.next() {
            match arrived.number {
                libc::SIGTERM | libc::SIGINT | libc::SIGQUIT | libc::SIGHUP => return Some(arrived.number),
                // One of each is enough, and bounds them.
                number if !others.iter().any(|other| other.number == number) => others.push(arrived),
                _ => {}
            }
        }
        if left.is_zero() {
            return None;
        }
    }
}

/// A listening socket that stands for COMMAND: on no one's way, never accepted from, closed by COMMAND's exec in its
/// process and by us at its end.
fn presence(log: &Log) -> Option<OwnedFd> {
    let addresses = PRESENCE_PORTS
        .map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)))
        .chain(PRESENCE_PORTS.map(|port| SocketAddr::from((Ipv6Addr::LOCALHOST, port))));
    let mut refused = None;
    for address in addresses {
        match listen_at(address) {
            Ok(socket) => {
                log.debug("presence listener", &[("address", &address)]);
                return Some(socket);
            }
            Err(error) => refused = Some(error),
        }
    }
    let error = refused.map_or(String::new(), |error| error.to_string());
    log.warn("no presence listener: a hold does not wait for a silent COMMAND", &[("error", &error)]);
    None
}

fn listen_at(address: SocketAddr) -> nix::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    listen(&socket, Backlog::new(0)?)?;
    Ok(socket)
}

/// Asks the proxy to quit, and waits for the end of what said yes. Bounded, ended by a signal, and never at the price of
/// COMMAND's status.
fn quit(settings: &Settings, signals: &Signals, log: &Log) {
    let mut early = Vec::new();
    let mut interrupted = || {
        let signal = stop_signal(signals, PAUSE, &mut early);
        if let Some(number) = signal {
            log.info("a signal ends the wait for the proxy's end", &[("signal", &Name(number))]);
        }
        signal.is_some()
    };
    let mut obeys = Vec::new();
    for url in &settings.quit_url {
        // The address that answered is kept for one server, and not for all.
        let mut api = ProxyApi::new();
        let start = Instant::now();
        let mut was_there = false;
        loop {
            let problem = match api.tell(url) {
                Ok(()) => {
                    log.info("the proxy was asked to quit", &[("url", url)]);
                    obeys.push(url);
                    break;
                }
                Err(problem) => problem,
            };
            // It may be too quick to answer.
            if was_there && problem.refused {
                obeys.push(url);
                break;
            }
            was_there |= !problem.refused;
            if !problem.passing || start.elapsed() >= QUIT_TIME {
                log.warn("cannot ask the proxy to quit", &[("url", url), ("error", &problem)]);
                break;
            }
            if interrupted() {
                return;
            }
        }
    }
    if obeys.is_empty() {
        return;
    }
    let start = Instant::now();
    while !obeys.iter().all(|url| ProxyApi::nobody_listens(url)) {
        if start.elapsed() >= GONE_TIME {
            log.warn("the proxy was asked to quit and is still there", &[]);
            return;
        }
        if interrupted() {
            return;
        }
    }
    log.info("the proxy is gone", &[]);
}
