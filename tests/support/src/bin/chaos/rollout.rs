//! A rollout as it happens: a Pod as drawn, its clients, its faults, and what became of them.

use crate::draw::{Address, Application, Client, Draw, Fault, How, Ms, Record, Shape, Through};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pod::{Builder, Line, Load, Pace, Pod, Request, Sink, SlowReader, StopPlan, StopReport, Upstream};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for something that is certain to come; only a failure gets there.
const LONG: Duration = Duration::from_secs(60);
/// How long before the stop the clients hear of it that hear before.
const BEFORE: Duration = Duration::from_millis(700);
/// The client that vanishes is in the middle of so many bytes, which a proxy's buffers hold.
const VANISHING: (u32, u32) = (400_000, 16 * 1024);
/// A slow reader may be later by so much less than what a draw leaves between its last client and its timeout.
const SPARE: Duration = Duration::from_secs(3);
const RECORD: &[u8] = b"the record\n";
const LAST_CALL: &str = "/last-call";

/// What became of it.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) report: StopReport,
    pub(crate) lines: Vec<Line>,
    pub(crate) text: String,
    /// Requests, calls and records that were made or tried.
    pub(crate) made: usize,
    /// What was lost, by whose it was.
    pub(crate) lost: BTreeMap<String, Vec<Loss>>,
    /// When Envoy was killed or crashed.
    pub(crate) envoy_died: Option<Instant>,
    /// When the last client was done.
    pub(crate) clients_done: Instant,
    /// By how much a slow reader took longer than drawn.
    reader_late: Duration,
}

#[derive(Debug)]
pub(crate) struct Loss {
    pub(crate) at: Instant,
    pub(crate) what: String,
}

/// A drawn client at work.
enum AtWork {
    Load(Load),
    Slow(SlowReader),
    /// What it misses is no loss.
    Vanishing(SlowReader),
}

/// Makes the Pod and stops it; as the control, with a proxy that goes when all is over.
pub(crate) fn roll_out(draw: &Draw, control: bool) -> Result<Seen> {
    let pod = build(draw, control).start_unready()?;
    let upstream = pod.upstream(9000)?;
    let sink = match draw.application.record {
        Some(Record::Tls(hello)) => pod.tls_upstream(9443, ms(hello))?,
        _ => pod.tcp_upstream(9100)?,
    };
    pod.await_ready()?;
    let clients: Vec<_> =
        draw.clients.iter().map(|client| (client.to_string(), start(&pod, draw, *client))).collect();
    for (name, client) in &clients {
        if let AtWork::Load(load) = client {
            ensure!(load.wait_started(3, LONG), "the clients do not get going: {name}");
        }
    }
    // What was asked for first is on its way through everything.
    thread::sleep(Duration::from_millis(300));
    let hear = |at: Instant| {
        for (_, client) in &clients {
            if let AtWork::Load(load) = client {
                load.hear_at(at);
            }
        }
    };
    if draw.hear.is_none() {
        hear(Instant::now());
        thread::sleep(BEFORE);
    }
    let mut throttles = Vec::new();
    for fault in &draw.faults {
        match *fault {
            Fault::Port { port, how: How::TalksNonsense } => pod.confuse(port)?,
            Fault::Port { port, how } => pod.wall_off(port, how == How::Refuses)?,
            Fault::Starved { who, percent } => throttles.push(pod.throttle(who, percent)?),
            Fault::Files { who, more } => pod.limit_files(who, more)?,
            Fault::SynsDropped { count } => pod.drop_syns(9000, count)?,
            _ => {}
        }
    }
    for (_, client) in &clients {
        if let AtWork::Vanishing(reader) = client {
            pod.silence(reader.port)?;
        }
    }
    let stop = Instant::now();
    if let Some(after) = draw.hear {
        hear(stop + ms(after));
    }
    let vanished = |client: &(String, AtWork)| matches!(client.1, AtWork::Vanishing(_));
    let (vanished, present): (Vec<_>, Vec<_>) = clients.into_iter().partition(vanished);
    let mut results = Vec::new();
    let killed = Mutex::default();
    let report = thread::scope(|s| {
        for fault in &draw.faults {
            s.spawn(|| strike(&pod, draw, *fault, stop, &killed));
        }
        if control {
            pod.stop_in_turn(Duration::from_secs(draw.grace), || results = finish(present))
        } else {
            let report = pod.stop(&plan(draw));
            results = finish(present);
            report
        }
    });
    // They wait for the end of the Pod's network.
    finish(vanished);
    drop(throttles);
    let mut seen = Seen {
        report,
        lines: Vec::new(),
        text: String::new(),
        made: 0,
        lost: BTreeMap::new(),
        envoy_died: killed.into_inner().expect("no panic holds it"),
        clients_done: stop,
        reader_late: Duration::ZERO,
    };
    for (client, (_, requests)) in draw.clients.iter().filter(|c| **c != Client::Vanishes).zip(&results) {
        if let (Client::Slow { .. }, [request]) = (client, requests.as_slice()) {
            let late = (request.ended - request.started).saturating_sub(ms(client.takes()));
            seen.reader_late = seen.reader_late.max(late);
        }
    }
    seen.count_requests(results);
    seen.count_calls(draw, &upstream, &sink);
    seen.lines = pod.log().lines();
    let crash = pod.log().find("sidecar", "Caught Segmentation fault");
    seen.envoy_died = seen.envoy_died.or(crash.map(|line| line.at));
    seen.text = pod.log().text();
    Ok(seen)
}

fn build(draw: &Draw, control: bool) -> Builder {
    let agent = ["pilot-agent", "proxy", "sidecar"];
    let wrapped = [&["outlast", "run", "--"], &agent[..]].concat();
    let argv = if control || draw.through == Through::Prestop { &agent[..] } else { &wrapped };
    let flags = flags(&draw.application);
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
    let mut builder = Pod::builder()
        .sidecar(argv)
        .program(pod::outlast(), "outlast")
        .env("TERMINATION_DRAIN_DURATION_SECONDS", &draw.own_drain.to_string())
        .env("POD_TCP_PORT", "8090")
        .env("POD_TLS_PORT", "9443")
        .env("POD_WITHOUT_DRAIN", &draw.old_agent.to_string())
        .application(&flags);
    if draw.has(|fault| matches!(fault, Fault::Port { how: How::TalksNonsense, .. })) {
        builder = builder.env("POD_NONSENSE", "true");
    }
    if draw.application.address == Address::Loopback {
        builder = builder.env("POD_INBOUND", "8080=127.0.0.1:8080");
    }
    for (name, value) in draw.settings.env(draw.grace) {
        builder = builder.env(name, &value);
    }
    for (name, value) in &draw.env {
        builder = builder.env(name, value);
    }
    if matches!(draw.application.shape, Shape::Silent(_)) {
        builder = builder.wrap_application(pod::outlast(), "outlast", &["outlast", "app", "--"]);
    }
    builder
}

/// Of the fixture's application.
fn flags(application: &Application) -> Vec<String> {
    let host = match application.address {
        Address::V4 => "0.0.0.0",
        Address::V6 => "[::]",
        Address::Loopback => "127.0.0.1",
    };
    let seconds = |time: Ms| format!("{}s", ms(time).as_secs_f64());
    let mut flags = vec!["--serve-more".to_owned(), seconds(application.serve_more)];
    let mut add = |words: &[String]| flags.extend_from_slice(words);
    if application.shape == Shape::Works {
        add(&["--worker".to_owned(), "10.9.0.1:9000".to_owned()]);
    } else {
        for _ in 0..=u32::from(application.twice) {
            add(&["--listen".to_owned(), format!("{host}:8080"), "--tcp".to_owned(), format!("{host}:8090")]);
        }
    }
    match application.shape {
        Shape::Silent(time) => add(&["--silent".to_owned(), seconds(time)]),
        Shape::NeverStops => add(&["--never-stop".to_owned()]),
        Shape::Serves | Shape::Works => {}
    }
    add(&["--workers".to_owned(), application.workers.to_string()]);
    if application.each_closed {
        add(&["--each-closed".to_owned()]);
    }
    if application.blink {
        add(&["--blink".to_owned(), format!("{host}:8099")]);
    }
    if let Some(gap) = application.reload {
        add(&["--reload".to_owned(), seconds(gap)]);
    }
    match application.record {
        Some(Record::Plain) => add(&["--record".to_owned(), "10.9.0.1:9100".to_owned()]),
        Some(Record::Tls(_)) => add(&["--record".to_owned(), "10.9.0.1:9443".to_owned()]),
        None => {}
    }
    if let Some(time) = application.last_call {
        add(&["--last-call".to_owned(), format!("http://10.9.0.1:9000{LAST_CALL}?ms={time}")]);
    }
    flags
}

fn plan(draw: &Draw) -> StopPlan {
    let mut plan = StopPlan::new(Duration::from_secs(draw.grace));
    if draw.through != Through::Run {
        plan = plan.hook(&["outlast", "prestop"]);
    }
    for fault in &draw.faults {
        match *fault {
            Fault::StopRepeated { after } => plan.repeat = Some(ms(after)),
            Fault::HookTwice { after } => plan.again = Some(ms(after)),
            _ => {}
        }
    }
    plan
}

/// The Pod as its clients know it.
fn host(draw: &Draw) -> &'static str {
    if draw.application.address == Address::V6 { "[fd00:9::2]" } else { "10.9.0.2" }
}

fn start(pod: &Pod, draw: &Draw, client: Client) -> AtWork {
    let url = |port: u16, path: &str| format!("http://{}:{port}{path}", host(draw));
    let load =
        |port, takes: Ms, pace| AtWork::Load(pod.load(&url(port, &format!("/delay?ms={takes}")), pace));
    let slow = |bytes: u32, rate| pod.slow_reader(&url(8080, &format!("/bytes?n={bytes}")), rate);
    match client {
        Client::Http { per_second, takes } => load(8080, takes, Pace::PerSecond(per_second)),
        Client::KeepAlive { clients, takes } => load(8080, takes, Pace::KeepAlive(clients)),
        Client::Http2 { per_second, takes } => load(8080, takes, Pace::Http2(per_second)),
        Client::Echo { clients } => load(8090, 0, Pace::Echo(clients)),
        Client::HalfClosed { per_second, takes } => load(8090, takes, Pace::HalfClosed(per_second)),
        Client::HalfClosing { per_second, takes } => load(8090, takes, Pace::HalfClosing(per_second)),
        Client::Slow { bytes, rate } => AtWork::Slow(slow(bytes, rate)),
        Client::Vanishes => AtWork::Vanishing(slow(VANISHING.0, VANISHING.1)),
    }
}

/// Waits for the clients' last answers.
fn finish(clients: Vec<(String, AtWork)>) -> Vec<(String, Vec<Request>)> {
    let requests = |client| match client {
        AtWork::Load(load) => load.finish(),
        AtWork::Slow(reader) | AtWork::Vanishing(reader) => vec![reader.finish()],
    };
    clients.into_iter().map(|(name, client)| (name, requests(client))).collect()
}

/// Does at its time what a fault has to do during the stop.
fn strike(pod: &Pod, draw: &Draw, fault: Fault, stop: Instant, killed: &Mutex<Option<Instant>>) {
    let wait_until = |at: Ms| thread::sleep((stop + ms(at)).saturating_duration_since(Instant::now()));
    let send = |pids: &[i32], signal| {
        for pid in pids {
            // One that has ended meanwhile is a fault that came too late.
            let _ = kill(Pid::from_raw(*pid), signal);
        }
    };
    match fault {
        Fault::EnvoyKilled { at } => {
            wait_until(at);
            let pids = pod.called("envoy");
            *killed.lock().expect("no panic holds it") = (!pids.is_empty()).then(Instant::now);
            send(&pids, Signal::SIGKILL);
        }
        Fault::Paused { who, at, time } => {
            wait_until(at);
            let pids = pod.called(who);
            send(&pids, Signal::SIGSTOP);
            thread::sleep(ms(time));
            send(&pids, Signal::SIGCONT);
        }
        Fault::Interrupted { after } => {
            let source = if draw.through == Through::Prestop { "hook" } else { "sidecar" };
            // The verdict misses the release if there was no hold.
            let _ = pod.log().wait_for(source, "hold started", LONG);
            thread::sleep(ms(after));
            send(&pod.sidecar().others("outlast"), Signal::SIGINT);
        }
        _ => {}
    }
}

fn ms(time: Ms) -> Duration {
    Duration::from_millis(time)
}

impl Seen {
    fn count_requests(&mut self, results: Vec<(String, Vec<Request>)>) {
        for (name, requests) in results {
            self.made += requests.len();
            for request in requests {
                self.clients_done = self.clients_done.max(request.ended);
                let since = |at: Instant| at.saturating_duration_since(self.report.started).as_secs_f64();
                if let Err(error) = &request.result {
                    let (from, to) = (since(request.started), since(request.ended));
                    let what = format!("from {from:.3} to {to:.3} s after the stop: {error}");
                    self.lost.entry(name.clone()).or_default().push(Loss { at: request.ended, what });
                }
            }
        }
    }

    /// What the application had to do outside is done as often as it was to be.
    fn count_calls(&mut self, draw: &Draw, upstream: &Upstream, sink: &Sink) {
        let application = &draw.application;
        if application.shape == Shape::NeverStops {
            return;
        }
        let processes = draw.processes();
        let at = self.report.application.as_ref().map_or(self.report.started, |a| a.exit.at);
        let calls = upstream.calls();
        let called =
            |path: &str| calls.iter().filter(|(_, called)| called.split('?').next() == Some(path)).count();
        let mut expect = |kind: &str, wanted: usize, got: usize| {
            self.made += wanted;
            if got < wanted {
                let what = format!("{got} of {wanted} arrived");
                self.lost.entry(kind.to_owned()).or_default().push(Loss { at, what });
            }
        };
        if application.last_call.is_some() {
            expect("last call", processes, called(LAST_CALL));
        }
        if application.shape == Shape::Works {
            expect("worker's last request", 1, called("/last"));
        }
        if application.record.is_some() {
            let wanted = processes * RECORD.len();
            let got = sink.received(wanted, Duration::from_secs(1)).len();
            expect("record", processes, got / RECORD.len());
        }
        let status = self.report.application.as_ref().map(|application| application.exit.status);
        if status != Some(pod::Status::Code(0)) {
            let what = format!("the application ended with {status:?}");
            self.lost.entry("application".to_owned()).or_default().push(Loss { at, what });
        }
    }

    /// The machine was too busy for the draw: a reload took as long as the settle time, or a slow reader so much longer
    /// than it was to take that it was no client of this timeout.
    pub(crate) fn stretched(&self, draw: &Draw) -> bool {
        let gap = |line: &Line| -> Option<f64> {
            let text = line.text.strip_prefix("listening again gap=")?;
            text.parse().ok().filter(|_| line.source == "application")
        };
        let settle = ms(draw.settings.settle).as_secs_f64();
        self.reader_late > SPARE || self.lines.iter().filter_map(gap).any(|gap| gap >= settle)
    }

    /// The application's container, which every draw has.
    pub(crate) fn application(&self) -> Result<&pod::ContainerReport> {
        self.report.application.as_ref().context("no application")
    }
}
