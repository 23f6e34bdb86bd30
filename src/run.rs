//! `outlast run`: the entrypoint.

use std::ffi::OsString;
use std::time::Duration;

use nix::libc;

use crate::cli::Settings;
use crate::exit::Exit;
use crate::hold::{Reason, Terms};
use crate::init::child::Child;
use crate::init::signals::{Arrived, Name, Signals};
use crate::log::Log;
use crate::proxy_api::{ProxyApi, Url};
use crate::watch::Watch;

/// Starts COMMAND, passes signals on, holds on a stop signal, reaps; returns COMMAND's status.
pub fn run(settings: &Settings, terms: Terms, command: Vec<OsString>, log: &Log) -> Exit {
    let signals = match Signals::take_over(log) {
        Ok(signals) => signals,
        Err(exit) => return exit,
    };
    let child = match Child::start(&command, settings.signal_group, &[signals.raw()], log) {
        Ok(child) => child,
        Err(exit) => return exit,
    };
    // 2 MB of arguments are not for the life of a Pod.
    drop(command);
    let mut phase = Phase::Before;
    loop {
        let time = match &phase {
            Phase::Holding(_, watch) => Some(watch.time_left()),
            Phase::Before | Phase::After => None,
        };
        signals.wait(time);
        while let Some(arrived) = signals.next() {
            phase = on_signal(phase, arrived, &child, settings, terms, log);
        }
        if let Some(exit) = child.reap() {
            if let Phase::Holding(_, watch) = &phase {
                watch.released(Reason::ProxyGone);
            }
            log.info("COMMAND ended", &[("status", &u8::from(exit))]);
            return exit;
        }
        if let Phase::Holding(stop, watch) = &mut phase
            && let Some(reason) = watch.look_if_due()
        {
            watch.released(reason);
            if settings.fast_exit && reason == Reason::Clear && watch.nothing_to_drain() {
                skip_drain(log);
            }
            child.stop(*stop);
            phase = Phase::After;
        }
    }
}

/// Before, in and after the hold. The number is that of the stop signal that started it.
enum Phase<'a> {
    Before,
    Holding(i32, Box<Watch<'a>>),
    After,
}

fn on_signal<'a>(
    phase: Phase<'a>,
    arrived: Arrived,
    child: &Child,
    settings: &Settings,
    terms: Terms,
    log: &'a Log,
) -> Phase<'a> {
    let number = arrived.number;
    match (phase, number) {
        (Phase::Before, libc::SIGTERM | libc::SIGINT) => {
            let name = Name(number);
            if settings.native_sidecar || terms.timeout == Duration::ZERO {
                log.info("hold released", &[("reason", &Reason::Off), ("signal", &name)]);
                child.stop(number);
                return Phase::After;
            }
            log.info("stop signal", &[("signal", &name), ("sender", &arrived.sender)]);
            Phase::Holding(number, Box::new(Watch::start(log, settings, terms, Some(child.pid()))))
        }
        (Phase::Holding(stop, watch), libc::SIGTERM) => {
            log.info("a further SIGTERM changes nothing: the hold goes on", &[("sender", &arrived.sender)]);
            Phase::Holding(stop, watch)
        }
        (Phase::Holding(stop, watch), libc::SIGINT | libc::SIGQUIT) => {
            log.info("a signal ends the hold", &[("signal", &Name(number))]);
            watch.released(Reason::Signal(number));
            child.stop(stop);
            Phase::After
        }
        (Phase::After, libc::SIGTERM | libc::SIGINT) => {
            child.stop(number);
            Phase::After
        }
        (phase, _) => {
            child.pass_on(arrived);
            phase
        }
    }
}

/// Tells pilot-agent that there is nothing left for it to drain.
fn skip_drain(log: &Log) {
    match ProxyApi::new().tell(&Url::agent_drain()) {
        Ok(()) => log.debug("pilot-agent will exit at once", &[]),
        Err(error) => log.warn("cannot skip pilot-agent's own drain", &[("error", &error)]),
    }
}
