//! `outlast run`: the entrypoint.

use std::env;
use std::ffi::OsString;
use std::mem::take;
use std::os::fd::{AsFd, AsRawFd};
use std::process;
use std::time::Duration;

use nix::libc;

use crate::cli::Settings;
use crate::exit::Exit;
use crate::hold::{Reason, Terms};
use crate::init::first::{Inherited, take_over};
use crate::init::reap::{Change, next_change};
use crate::init::signals::{Arrived, Name, Signals};
use crate::init::spawn::{close_inherited, spawn};
use crate::init::terminal::Terminal;
use crate::log::{Field, Log};
use crate::pod::kernel::Proc;
use crate::proxy_api::{ProxyApi, Url};
use crate::watch::Watch;

/// Starts COMMAND, passes signals on, holds on a stop signal, reaps; returns COMMAND's status.
pub fn run(settings: &Settings, terms: Terms, mut command: Vec<OsString>, log: &Log) -> Exit {
    let own_pid = process::id().cast_signed();
    take_over();
    if own_pid != 1
        && let Err(error) = nix::sys::prctl::set_child_subreaper(true)
    {
        log.debug("cannot become a subreaper: orphans go to another init", &[("error", &error)]);
    }
    let signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => {
            log.error("cannot open the queue of signals", &[("error", &error)]);
            return Exit::Failure;
        }
    };
    let terminal = Terminal::in_foreground();
    let name = command.first().cloned().unwrap_or_default();
    let name = name.display();
    let pid = match spawn(&command, terminal.as_ref(), Inherited::get()) {
        Ok(pid) => pid,
        Err(refused) => {
            let status = u8::from(refused.exit);
            let fields: [Field; 3] = [("command", &name), ("why", &refused.why), ("status", &status)];
            log.error("cannot run COMMAND", &fields);
            return refused.exit;
        }
    };
    let mut keep = vec![signals.as_fd().as_raw_fd()];
    keep.extend(terminal.as_ref().map(Terminal::raw));
    close_inherited(&keep);
    // A working directory pins its mount. Where / cannot be entered, nothing is lost but that.
    let _ = env::set_current_dir("/");
    // 2 MB of arguments are not for the life of a Pod.
    drop(take(&mut command));
    log.debug("started", &[("pid", &pid)]);
    let mut child = Child { pid, own_pid, terminal, group: settings.signal_group, log };
    let mut phase = Phase::Before;
    loop {
        let time = match &phase {
            Phase::Holding(_, watch) => Some(watch.time_left()),
            Phase::Before | Phase::After => None,
        };
        signals.wait(time);
        while let Some(arrived) = signals.next() {
            phase = on_signal(phase, arrived, &mut child, settings, terms, log);
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
            if settings.fast_exit && reason == Reason::Clear && watch.has_pilot_agent() {
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
    Holding(i32, Box<Watch<'a, Proc>>),
    After,
}

fn on_signal<'a>(
    phase: Phase<'a>,
    arrived: Arrived,
    child: &mut Child,
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
            Phase::Holding(number, Box::new(Watch::start(log, Proc, settings, terms, Some(child.pid))))
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
            if arrived.is_for_child(child.own_pid) {
                child.signal(number);
            }
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

/// COMMAND's process.
struct Child<'a> {
    pid: i32,
    own_pid: i32,
    terminal: Option<Terminal>,
    /// Signals go to its process group.
    group: bool,
    log: &'a Log,
}

impl Child<'_> {
    /// Passes a stop signal on. A stopped process would not notice it: SIGCONT follows, as in systemd.
    fn stop(&self, number: i32) {
        self.log.info("stop signal forwarded", &[("signal", &Name(number)), ("pid", &self.pid)]);
        self.signal(number);
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, number: i32) {
        if let (libc::SIGCONT, Some(terminal)) = (number, &self.terminal) {
            terminal.pass_on(self.pid);
        }
        // SAFETY: plain numbers; the child is not reaped yet, so the pid is its own. nix's kill knows no
        // real-time signals.
        let sent = unsafe {
            // Its group is empty where it has moved to another: then it alone is meant.
            (self.group && libc::kill(self.pid.saturating_neg(), number) == 0)
                || libc::kill(self.pid, number) == 0
        };
        if !sent {
            let error = std::io::Error::last_os_error();
            let fields: [Field; 3] = [("signal", &Name(number)), ("pid", &self.pid), ("error", &error)];
            self.log.warn("cannot signal COMMAND", &fields);
        }
    }

    /// Reaps whatever there is, then says how COMMAND ended, if it did.
    fn reap(&self) -> Option<Exit> {
        let mut exit = None;
        while let Some((pid, change)) = next_change() {
            if pid != self.pid {
                continue;
            }
            match change {
                Change::Exited(status) => exit = Some(Exit::Status(status)),
                Change::Killed(number) => exit = Some(Exit::Signal(u8::try_from(number).unwrap_or(u8::MAX))),
                Change::Stopped(number) => self.on_stopped(number),
            }
        }
        exit
    }

    /// ^Z stopped COMMAND, which has the terminal. The shell that waits for us must see us stop as well, or no one
    /// has the terminal any more. With `fg` comes SIGCONT, which is passed on.
    fn on_stopped(&self, number: i32) {
        if self.terminal.is_some()
            && self.own_pid != 1
            && matches!(number, libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU)
        {
            // SAFETY: plain numbers.
            unsafe { libc::kill(self.own_pid, libc::SIGSTOP) };
        }
    }
}
