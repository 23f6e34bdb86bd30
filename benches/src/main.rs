//! Measures outlast and its peers, side by side in one run: see scripts/bench. Each measurement that needs a Pod is a
//! process of this program in namespaces of its own.

#![allow(clippy::unchecked_time_subtraction, reason = "the clock is monotonic; what is not is to be seen")]

mod cpu;
mod inits;
mod look;
mod plot;
mod pod;
mod release;
mod report;

use crate::cpu::Samples;
use crate::report::{Hold, Look, Measured, Release};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs, thread};

/// Sockets in the Pod, half of them Envoy's.
const CONNECTIONS: [u32; 4] = [0, 200, 2_000, 9_000];
const HOLD: u32 = 20;
/// The loop that outlast replaces.
const NETSTAT_LOOP: &str = "while [ $(netstat -plunt | grep tcp | egrep -v 'envoy|pilot-agent' | wc -l | xargs) \
                            -ne 0 ]; do sleep 1; done";

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["all", outlast, docs] => all(Path::new(outlast), Path::new(docs)),
        // What follows is for this program itself.
        ["looks", connections, rounds] => look::looks(connections.parse()?, rounds.parse()?),
        ["count", source, connections, looks] => look::count(source, connections.parse()?, looks.parse()?),
        ["holds", outlast, seconds, connections, listen] => {
            look::holds(outlast.as_ref(), seconds.parse()?, connections.parse()?, listen == "listen")
        }
        ["release", "netstat", runs] => release::netstat(NETSTAT_LOOP, runs.parse()?),
        ["release", outlast, source, holder, runs] => {
            release::outlast(outlast.as_ref(), source, holder, runs.parse()?)
        }
        ["release", "sleep", runs] => {
            release::sleeps(runs.parse()?);
            Ok(())
        }
        ["stamp", how] => {
            pod::stamp(how == "exit");
            Ok(())
        }
        ["orphans", count] => pod::orphans(count.parse()?),
        ["listen", ..] => pod::listen(&words[1..]),
        ["apply", count, ..] => pod::apply(count.parse()?, &words[2..]),
        _ => bail!("usage: bench all OUTLAST DOCS"),
    }
}

fn all(outlast: &Path, docs: &Path) -> Result<()> {
    let outlast =
        &outlast.canonicalize().context("there is no static binary: scripts/build-static makes it")?;
    let bytes = fs::metadata(outlast)?.len();
    let facts = report::facts(outlast)?;
    let mut looks = Vec::new();
    for connections in CONNECTIONS {
        say(&format!("one look beside {connections} connections"));
        let samples = inside(&["looks", &connections.to_string(), "15"])?;
        looks.push(Look { connections, samples });
    }
    say("instructions of one look");
    let instructions = ["diag", "proc"].map(instructions);
    say("CPU over a hold, with listeners and without");
    let mut holds = Vec::new();
    for listen in ["listen", "quiet"] {
        let path = outlast.to_string_lossy();
        let samples = inside(&["holds", &path, &HOLD.to_string(), "9000", listen])?;
        holds.push(Hold { listen: listen == "listen", samples });
    }
    say("from the last holder's end to the forwarded signal");
    let release = releases(outlast)?;
    say("idle inits");
    let inits = inits::all(outlast);
    let idle = inits::idle(&inits, Duration::from_secs(10))?;
    say("start and end");
    let times = inits::start_and_end(&inits, 500)?;
    say("orphans");
    let reaped = inits::reaping(&inits, 1_000, 9)?;
    let names = inits.iter().map(|(name, _)| *name).collect();
    let [diag, proc] = instructions;
    let instructions = [diag?, proc?];
    let measured = Measured { facts, bytes, looks, instructions, holds, release, names, idle, times, reaped };
    fs::write(docs.join("benchmarks.md"), report::write(&measured)?)?;
    fs::write(docs.join("benchmarks.svg"), plot::draw(&measured.looks)?)?;
    println!("{}", report::budgets(&measured)?);
    Ok(())
}

fn say(what: &str) {
    eprintln!("bench: {what}");
}

/// What a process of this program in a Pod of its own prints: a name and samples a line.
fn inside(words: &[&str]) -> Result<Vec<(String, Samples)>> {
    let mut command = pod::in_namespaces(&env::current_exe()?, words);
    // Holds write their log there too.
    let output = command.stderr(Stdio::piped()).output()?;
    ensure!(
        output.status.success(),
        "{words:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout)?;
    let split = |line: &str| {
        let (name, samples) = line.split_once(' ').with_context(|| line.to_owned())?;
        Ok((name.to_owned(), Samples::from_text(samples)?))
    };
    text.lines().map(split).collect()
}

/// Of one look, in user space: what 1,000 looks more cost more.
fn instructions(source: &str) -> Result<f64> {
    let own = env::current_exe()?;
    let of = |looks: &str| -> Result<f64> {
        let words = [
            "--tool=callgrind",
            "--callgrind-out-file=/dev/null",
            &own.to_string_lossy(),
            "count",
            source,
            "200",
            looks,
        ];
        let output = pod::in_namespaces(Path::new("valgrind"), &words).stdout(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "callgrind: {text}");
        let line = text.lines().find_map(|line| line.split_once("Collected : "));
        Ok(line.with_context(|| text.clone())?.1.trim().parse()?)
    };
    Ok((of("1100")? - of("100")?) / 1_000.0)
}

/// Every kind of hold 200 times; the kinds run beside each other.
fn releases(outlast: &Path) -> Result<Vec<Release>> {
    let path = outlast.to_string_lossy().into_owned();
    let lane = |name: &'static str, words: Vec<String>| {
        thread::spawn(move || -> Result<Release> {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let (_, samples) = inside(&words)?.pop().context("no samples")?;
            Ok(Release { name, samples })
        })
    };
    let ours =
        |source: &str, holder: &str| ["release", &path, source, holder, "200"].map(str::to_owned).to_vec();
    let lanes = [
        lane("outlast, diag, a listener", ours("diag", "listener")),
        lane("outlast, diag, a connection", ours("diag", "connection")),
        lane("outlast, proc, a listener", ours("proc", "listener")),
        lane("outlast, proc, a connection", ours("proc", "connection")),
        lane("a bare sleep of 200 ms", ["release", "sleep", "200"].map(str::to_owned).to_vec()),
        lane("netstat loop, a listener", ["release", "netstat", "200"].map(str::to_owned).to_vec()),
    ];
    lanes.into_iter().map(|lane| lane.join().map_err(|_| anyhow::anyhow!("a lane failed"))?).collect()
}

/// The repository.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}
