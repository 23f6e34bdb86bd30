//! What an init costs: memory and wake-ups while idle, start-up, end, orphans.

use crate::cpu::{Samples, now, wait};
use crate::pod::{in_namespaces, named};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// An init with its arguments up to the command.
pub(crate) type Init = (&'static str, Vec<String>);

/// outlast and its peers.
pub(crate) fn all(outlast: &Path) -> Vec<Init> {
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
    vec![
        ("outlast", words(&[&outlast.to_string_lossy(), "run", "--"])),
        ("tini-static", words(&["tini-static", "--"])),
        ("dumb-init", words(&["dumb-init"])),
        ("catatonit", words(&["catatonit", "--"])),
    ]
}

/// What an idle one has and does.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    /// KiB, by the kernel's names: Rss, Pss, Anonymous.
    pub(crate) memory: BTreeMap<String, u64>,
    /// Voluntary context switches.
    pub(crate) wakeups: u64,
}

/// All of them beside each other, around a command that sleeps, for this long.
pub(crate) fn idle(inits: &[Init], time: Duration) -> Result<Vec<Idle>> {
    let start = |(_, argv): &Init| Command::new(&argv[0]).args(&argv[1..]).args(["sleep", "1000"]).spawn();
    let mut running = inits.iter().map(start).collect::<Result<Vec<_>, _>>()?;
    sleep(Duration::from_secs(1));
    let switches =
        |pid: u32| -> Result<u64> { field(&format!("/proc/{pid}/status"), "voluntary_ctxt_switches") };
    let before = running.iter().map(|child| switches(child.id())).collect::<Result<Vec<_>>>()?;
    sleep(time);
    let mut all = Vec::new();
    for (child, before) in running.iter().zip(before) {
        let wakeups = switches(child.id())? - before;
        let rollup = format!("/proc/{}/smaps_rollup", child.id());
        let memory = ["Rss", "Pss", "Anonymous"].map(|name| Ok((name.to_owned(), field(&rollup, name)?)));
        all.push(Idle { memory: memory.into_iter().collect::<Result<_>>()?, wakeups });
    }
    for child in &mut running {
        // SAFETY: plain numbers; the child is not waited for yet.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
        sleep(Duration::from_millis(500));
        let _ = child.kill();
        child.wait()?;
    }
    Ok(all)
}

/// A number of one of the kernel's lists of names and numbers.
fn field(path: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(path).with_context(|| path.to_owned())?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let number = line.and_then(|line| line.split_ascii_whitespace().next());
    Ok(number.with_context(|| format!("{path} has no {name}"))?.parse()?)
}

/// From before the spawn to the command's first own instruction, and from the command's last to the init's end; each in
/// turn, so that the machine's moods are shared.
pub(crate) fn start_and_end(inits: &[Init], runs: u32) -> Result<Vec<[Samples; 2]>> {
    let stamp = named("stamp")?;
    let mut all = vec![[Samples::default(), Samples::default()]; inits.len()];
    for _ in 0..runs {
        for ((name, argv), samples) in inits.iter().zip(&mut all) {
            let mut command = Command::new(&argv[0]);
            command.args(&argv[1..]).arg(&stamp).args(["stamp", "exit"]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let began = now();
            let mut child = command.spawn().with_context(|| (*name).to_owned())?;
            let (status, _) = wait(&child)?;
            let ended = now();
            ensure!(status == 0, "{name}: status {status}");
            let line = read_line(&mut child)?;
            let (first, last) = line.split_once(' ').context("two stamps")?;
            let at = |stamp: &str| -> Result<Duration> { Ok(Duration::from_nanos(stamp.parse()?)) };
            samples[0].push((at(first)? - began).as_secs_f64());
            samples[1].push((ended - at(last)?).as_secs_f64());
        }
    }
    Ok(all)
}

fn read_line(child: &mut std::process::Child) -> Result<String> {
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().context("a pipe")?).read_line(&mut line)?;
    Ok(line.trim().to_owned())
}

/// Orphans reaped a second, when `count` of them end at one time.
pub(crate) fn reaping(inits: &[Init], count: u32, runs: u32) -> Result<Vec<Samples>> {
    let own = named("stamp")?;
    let mut all = vec![Samples::default(); inits.len()];
    for _ in 0..runs {
        for ((name, argv), samples) in inits.iter().zip(&mut all) {
            let words: Vec<&str> = argv[1..].iter().map(String::as_str).collect();
            let own = own.to_string_lossy();
            let count = count.to_string();
            let words = [&words[..], &[&own, "orphans", &count]].concat();
            let output = in_namespaces(argv[0].as_ref(), &words).stderr(Stdio::null()).output()?;
            let text = String::from_utf8(output.stdout)?;
            let seconds: f64 = text.trim().parse().with_context(|| format!("{name}: {text:?}"))?;
            samples.push(f64::from(count.parse::<u32>()?) / seconds);
        }
    }
    Ok(all)
}
