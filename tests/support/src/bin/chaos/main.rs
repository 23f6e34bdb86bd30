//! Stops Pods as they come: each with an application, clients, settings and faults that are drawn from a seed and its
//! number. Fails if outlast lost something that a proxy which never stops would not have lost, or said what was not so.
//!
//! `chaos [--jobs N] COUNT SEED` stops so many; `chaos --replay SEED:INDEX` one of them, and shows all of its log.
//! `--verbose` shows every rollout's draw and verdict, and not only those that went wrong.
//! `--env NAME=VALUE` is one setting more for each: `OUTLAST_HOLD=listeners` shows what the verdicts find.

mod draw;
mod rollout;
mod verdict;

use anyhow::{Context, Result, bail, ensure};
use draw::Draw;
use lexopt::{Arg, ValueExt};
use rollout::{Seen, roll_out};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use verdict::{judge, without_excuse};

/// Side by side for each core: most of a rollout is waiting, and Envoy's start is not.
const JOBS_PER_CORE: usize = 4;
/// What a Pod takes of the memory, most of it Envoy.
const MEMORY_PER_JOB: u64 = 256 << 20;

/// So many controls at most: whether one of a client's requests meets a fault is chance.
const CONTROLS: usize = 10;

/// So often at most a rollout is made again that did not come out as drawn.
const AGAIN: usize = 3;

/// Names and values.
type Env = [(String, String)];

/// One rollout after its verdict.
struct Outcome {
    index: u64,
    draw: Draw,
    wrong: Vec<String>,
    reasons: Vec<String>,
    overshoot: Duration,
    made: usize,
    lost: usize,
    excused: usize,
    /// How often it was made in vain, on a machine that was too busy for it.
    again: usize,
    log: String,
}

#[derive(Default)]
struct Figures {
    rollouts: usize,
    failed: usize,
    made: usize,
    lost: usize,
    excused: usize,
    with_excuse: usize,
    again: usize,
    overshoot: Duration,
    reasons: BTreeMap<String, usize>,
    faults: BTreeMap<String, usize>,
    /// Rollouts that needed an excuse, by fault.
    excuses: BTreeMap<String, usize>,
}

fn main() -> Result<ExitCode> {
    let (mut numbers, mut jobs, mut replay, mut env) = (Vec::new(), default_jobs()?, None, Vec::new());
    let mut verbose = false;
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("verbose") => verbose = true,
            Arg::Long("jobs") => jobs = parser.value()?.parse()?,
            Arg::Long("replay") => replay = Some(parser.value()?.string()?),
            Arg::Long("env") => {
                let pair = parser.value()?.string()?;
                let (name, value) = pair.split_once('=').context("--env NAME=VALUE")?;
                env.push((name.to_owned(), value.to_owned()));
            }
            Arg::Value(number) => numbers.push(number.parse::<u64>()?),
            _ => return Err(arg.unexpected().into()),
        }
    }
    ensure!(jobs > 0, "--jobs is 1 at least");
    match (replay, numbers.as_slice()) {
        (Some(which), []) => {
            let (seed, index) = which.split_once(':').context("--replay SEED:INDEX")?;
            let (seed, index) = (seed.parse()?, index.parse()?);
            let outcome = one(seed, index, &env);
            say(&format!("{}\n{}", outcome.log, outcome.text(seed)));
            Ok(if outcome.wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        (None, &[count, seed]) => Ok(many(count, seed, jobs, &env, verbose)),
        _ => bail!("chaos [--jobs N] COUNT SEED, or chaos --replay SEED:INDEX"),
    }
}

/// As many as cores and free memory bear.
fn default_jobs() -> Result<usize> {
    let cores = thread::available_parallelism()?.get();
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB"));
    let free = free.context("MemAvailable")?.parse::<u64>()? << 10;
    Ok((cores * JOBS_PER_CORE).min(usize::try_from(free / MEMORY_PER_JOB)?).max(1))
}

fn many(count: u64, seed: u64, jobs: usize, env: &Env, verbose: bool) -> ExitCode {
    let began = Instant::now();
    let (next, figures) = (AtomicU64::new(0), Mutex::new(Figures::default()));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            let outcome = one(seed, index, env);
            if verbose || !outcome.wrong.is_empty() {
                say(&outcome.text(seed));
            }
            figures.lock().unwrap().add(&outcome);
        }
    };
    thread::scope(|s| {
        for _ in 0..jobs {
            s.spawn(work);
        }
    });
    let figures = figures.into_inner().unwrap();
    say(&figures.text(seed, jobs, began.elapsed()));
    if figures.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One rollout, with its control if it needs one.
fn one(seed: u64, index: u64, env: &Env) -> Outcome {
    let mut draw = Draw::new(seed, index);
    draw.env = env.to_vec();
    let mut outcome = Outcome {
        index,
        wrong: Vec::new(),
        reasons: Vec::new(),
        overshoot: Duration::ZERO,
        made: 0,
        lost: 0,
        excused: 0,
        again: 0,
        log: String::new(),
        draw,
    };
    loop {
        match attempt(&outcome.draw, false) {
            Ok(facts) if facts.stretched(&outcome.draw) && outcome.again < AGAIN => {
                outcome.again += 1;
            }
            Ok(facts) => {
                outcome.take(&facts);
                return outcome;
            }
            Err(error) => {
                outcome.wrong.push(format!("the fixture failed: {error}"));
                return outcome;
            }
        }
    }
}

/// A fixture fails by panicking.
fn attempt(draw: &Draw, control: bool) -> Result<Seen, String> {
    match catch_unwind(AssertUnwindSafe(|| roll_out(draw, control))) {
        Ok(done) => done.map_err(|error| format!("{error:#}")),
        Err(panic) => Err(panic.downcast_ref::<String>().cloned().unwrap_or_else(|| "a panic".to_owned())),
    }
}

impl Outcome {
    fn take(&mut self, seen: &Seen) {
        let verdict = judge(&self.draw, seen);
        self.wrong.extend(verdict.wrong);
        self.reasons = verdict.reasons;
        self.overshoot = verdict.overshoot;
        self.made = seen.made;
        self.log.clone_from(&seen.text);
        let lost: usize = seen.lost.values().map(Vec::len).sum();
        let mut control_lost = BTreeSet::new();
        // Without an excuse the control is for whoever reads the log.
        for number in 1..=if self.draw.has_excuse() { CONTROLS } else { 1 } {
            if without_excuse(&self.draw, seen, &self.reasons, &control_lost).is_empty() {
                break;
            }
            match attempt(&self.draw.control(), true) {
                Ok(control) => {
                    let kinds = control.lost.keys().cloned().collect::<Vec<_>>().join("; ");
                    let _ = write!(self.log, "--- control {number}, lost: {kinds}\n{}", control.text);
                    control_lost.extend(control.lost.into_keys());
                }
                Err(error) => self.wrong.push(format!("the control failed: {error}")),
            }
        }
        for (kind, losses) in without_excuse(&self.draw, seen, &self.reasons, &control_lost) {
            self.lost += losses.len();
            self.wrong.push(format!("{kind}: {} lost, the first {}", losses.len(), losses[0].what));
        }
        self.excused = lost - self.lost;
    }

    fn text(&self, seed: u64) -> String {
        let index = self.index;
        let mut text = format!("--- {seed}:{index}\n{}", self.draw);
        let reasons = self.reasons.join(", ");
        let _ = writeln!(
            text,
            "{} requests and calls, {} lost, {} excused, reason {reasons}",
            self.made, self.lost, self.excused
        );
        for wrong in &self.wrong {
            let _ = writeln!(text, "WRONG: {wrong}");
        }
        let _ = write!(text, "again with its log: scripts/chaos --replay {seed}:{index}");
        text
    }
}

impl Figures {
    fn add(&mut self, outcome: &Outcome) {
        self.rollouts += 1;
        self.failed += usize::from(!outcome.wrong.is_empty());
        self.made += outcome.made;
        self.lost += outcome.lost;
        self.excused += outcome.excused;
        self.again += outcome.again;
        self.with_excuse += usize::from(outcome.excused > 0);
        self.overshoot = self.overshoot.max(outcome.overshoot);
        for reason in &outcome.reasons {
            *self.reasons.entry(reason.clone()).or_default() += 1;
        }
        for fault in &outcome.draw.faults {
            *self.faults.entry(fault.name()).or_default() += 1;
            if outcome.excused > 0 && !fault.of_outlast() {
                *self.excuses.entry(fault.name()).or_default() += 1;
            }
        }
    }

    fn text(&self, seed: u64, jobs: usize, took: Duration) -> String {
        let list = |counts: &BTreeMap<String, usize>| {
            counts.iter().map(|(name, count)| format!("{name} {count}")).collect::<Vec<_>>().join(", ")
        };
        format!(
            "faults: {}\nexcuses: {}\nreleases: {}; longest overshoot past a timeout {:.3} s; {} made again\n\
             chaos: {} rollouts of seed {seed}, {jobs} side by side, in {:.0} s: {} failed; \
             {} requests and calls, {} lost, {} excused in {} rollouts",
            list(&self.faults),
            list(&self.excuses),
            list(&self.reasons),
            self.overshoot.as_secs_f64(),
            self.again,
            self.rollouts,
            took.as_secs_f64(),
            self.failed,
            self.made,
            self.lost,
            self.excused,
            self.with_excuse,
        )
    }
}

/// A reader that has gone away is no reason to stop.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
