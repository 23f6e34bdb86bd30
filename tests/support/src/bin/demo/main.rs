//! Stops the same Pod in seven ways, side by side, and shows what that costs: a table on stdout, and a picture.
//!
//! `demo OUTLAST PICTURE`: the static binary, and where the picture goes. Fails if outlast loses anything.

mod picture;

use anyhow::{Context, Result, ensure};
use pod::{Pace, Pod, StopPlan};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const GRACE: Duration = Duration::from_secs(30);
/// How long the clients make requests before the stop, and how long after it they go on.
const BEFORE: Duration = Duration::from_millis(1500);
const AFTER: Duration = Duration::from_millis(1500);
const PER_SECOND: u32 = 40;

const NETSTAT_LOOP: &str = "while [ $(netstat -plunt | grep tcp | egrep -v 'envoy|pilot-agent' | wc -l | xargs) \
                            -ne 0 ]; do sleep 1; done";

/// One way to stop a Pod.
struct Way {
    name: &'static str,
    sidecar: &'static [&'static str],
    hook: &'static [&'static str],
    /// Istio's own setting.
    env: Option<(&'static str, &'static str)>,
    outlast: bool,
}

impl Way {
    const fn new(name: &'static str) -> Self {
        Self { name, sidecar: AGENT, hook: &[], env: None, outlast: false }
    }
}

const AGENT: &[&str] = &["pilot-agent", "proxy", "sidecar"];
const WAYS: [Way; 7] = [
    Way::new("nothing"),
    Way { hook: &["sleep", "15"], ..Way::new("sleep 15") },
    Way { hook: &["sh", "-c", NETSTAT_LOOP], ..Way::new("netstat loop") },
    // terminationDrainDuration, which pilot-agent gets as this variable.
    Way { env: Some(("TERMINATION_DRAIN_DURATION_SECONDS", "15")), ..Way::new("drain duration 15 s") },
    Way { env: Some(("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "true")), ..Way::new("exit on zero") },
    Way {
        sidecar: &["outlast", "run", "--", "pilot-agent", "proxy", "sidecar"],
        outlast: true,
        ..Way::new("outlast run")
    },
    Way { hook: &["outlast", "prestop"], outlast: true, ..Way::new("outlast prestop") },
];

/// What was seen of one way. All times are seconds since the stop began.
struct Seen {
    name: &'static str,
    /// When each request began, and whether it was lost.
    requests: Vec<(f64, bool)>,
    /// When the last call was made or given up, and whether it was made.
    last_call: (f64, bool),
    closed: f64,
    application: f64,
    proxy: f64,
}

impl Seen {
    fn lost(&self) -> usize {
        self.requests.iter().filter(|(_, lost)| *lost).count()
    }
}

fn main() -> Result<ExitCode> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [outlast, picture] = args.as_slice() else { anyhow::bail!("demo OUTLAST PICTURE") };
    let outlast =
        Path::new(outlast).canonicalize().with_context(|| format!("{outlast}: see scripts/demo"))?;

    say("Starting seven Pods, each with an application and a real Envoy as its sidecar.");
    let (ready, started) = (Barrier::new(WAYS.len()), Instant::now());
    let seen = thread::scope(|s| {
        let threads: Vec<_> =
            WAYS.iter().map(|way| s.spawn(|| stop(way, &outlast, &ready, started))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a Pod")).collect::<Result<Vec<_>>>()
    })?;

    say(&format!("\n{}", table(&seen)));
    std::fs::write(picture, picture::draw(&seen)).with_context(|| picture.clone())?;
    say(&format!("The timelines are in {picture}."));
    let lossless = |seen: &Seen| seen.lost() == 0 && seen.last_call.1;
    let wrong = WAYS.iter().zip(&seen).filter(|(way, seen)| way.outlast && !lossless(seen)).count();
    ensure!(wrong == 0, "outlast lost something");
    Ok(ExitCode::SUCCESS)
}

/// A reader that has gone away is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Runs one Pod from its start to its end.
fn stop(way: &Way, outlast: &Path, ready: &Barrier, begun: Instant) -> Result<Seen> {
    let event =
        |who: &str, text: &str| say(&format!("{:5.1} s  {who:19}  {text}", begun.elapsed().as_secs_f64()));
    let everyone = |leader: bool, text: &str| {
        if leader {
            event("all seven", text);
        }
    };
    let application =
        ["--listen", "0.0.0.0:8080", "--serve-more", "2s", "--last-call", "http://10.9.0.1:9000/last"];
    let mut builder =
        Pod::builder().sidecar(way.sidecar).program(outlast, "outlast").application(&application);
    if let Some((name, value)) = way.env {
        builder = builder.env(name, value);
    }
    let pod = builder.start();
    // Everyone waits, those that failed too: otherwise the others would for ever.
    everyone(ready.wait().is_leader(), "ready; clients send 40 requests a second, each takes 9 s");
    let pod = pod?;
    let _upstream = pod.upstream(9000)?;
    let load = pod.load("http://10.9.0.2:8080/delay?ms=9000", Pace::PerSecond(PER_SECOND));
    thread::sleep(BEFORE);
    everyone(
        ready.wait().is_leader(),
        "stop; the application closes its listener after 2 s and finishes its requests",
    );
    load.hear_at(Instant::now() + AFTER);
    let mut plan = StopPlan::new(GRACE);
    if !way.hook.is_empty() {
        plan = plan.hook(way.hook);
    }
    let report = pod.stop(&plan);
    let requests = load.finish();

    let since = |at: Instant| {
        at.saturating_duration_since(report.started).as_secs_f64()
            - report.started.saturating_duration_since(at).as_secs_f64()
    };
    let line = |text: &str| pod.log().find("application", text);
    let made = line("last call made");
    let last_call =
        made.clone().or_else(|| line("last call lost")).context("the application made no last call")?;
    let seen = Seen {
        name: way.name,
        requests: requests.iter().map(|r| (since(r.started), r.result.is_err())).collect(),
        last_call: (since(last_call.at), made.is_some()),
        closed: since(line("listeners closed").context("the application closed no listener")?.at),
        application: since(report.application.context("no application")?.exit.at),
        proxy: since(report.sidecar.exit.at),
    };
    let (proxy, application) = (seen.proxy, seen.application);
    event(
        way.name,
        &format!("gone; the proxy lived {proxy:.1} s after the stop, the application {application:.1} s"),
    );
    if way.outlast && (seen.lost() > 0 || made.is_none()) {
        eprintln!("--- log of {}\n{}---", way.name, pod.log().text());
    }
    Ok(seen)
}

fn table(seen: &[Seen]) -> String {
    let head =
        ["preStop, setting or entrypoint", "requests lost", "last call", "proxy outlived the application"];
    let row = |s: &Seen| {
        [
            s.name.to_owned(),
            format!("{} of {}", s.lost(), s.requests.len()),
            if s.last_call.1 { "made" } else { "lost" }.to_owned(),
            format!("{:+.1} s", s.proxy - s.application),
        ]
    };
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned)).chain(seen.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let line = |row: &[String; 4]| {
        let [a, b, c, d] = row;
        let (wa, wb, wc, wd) = (width(0), width(1), width(2), width(3));
        format!("{a:wa$}   {b:>wb$}   {c:wc$}   {d:>wd$}\n")
    };
    rows.iter().map(line).collect()
}
