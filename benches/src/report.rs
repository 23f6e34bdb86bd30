//! docs/benchmarks.md.

use crate::cpu::Samples;
use crate::inits::Idle;
use crate::repository;
use anyhow::{Context, Result};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

const KIB: f64 = 1024.0;
const SIZE_BUDGET: f64 = 640.0 * KIB;
const SETTLE: f64 = 0.2;
/// The longest time between two looks with `--poll=auto`.
const LONGEST_POLL: f64 = 0.25;

pub(crate) struct Look {
    pub(crate) connections: u32,
    pub(crate) samples: Vec<(String, Samples)>,
}

pub(crate) struct Hold {
    pub(crate) listen: bool,
    pub(crate) samples: Vec<(String, Samples)>,
}

pub(crate) struct Release {
    pub(crate) name: &'static str,
    pub(crate) samples: Samples,
}

pub(crate) struct Measured {
    pub(crate) facts: String,
    pub(crate) bytes: u64,
    pub(crate) looks: Vec<Look>,
    /// Of one look: diag, proc.
    pub(crate) instructions: [f64; 2],
    pub(crate) holds: Vec<Hold>,
    pub(crate) release: Vec<Release>,
    /// The inits, outlast first, then tini-static; in this order all that follows.
    pub(crate) names: Vec<&'static str>,
    pub(crate) idle: Vec<Idle>,
    pub(crate) times: Vec<[Samples; 2]>,
    pub(crate) reaped: Vec<Samples>,
}

pub(crate) fn of<'a>(samples: &'a [(String, Samples)], name: &str) -> Result<&'a Samples> {
    samples.iter().find(|(one, _)| one == name).map(|(_, samples)| samples).with_context(|| name.to_owned())
}

/// A time with three figures.
fn time(seconds: f64) -> String {
    let (number, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    format!("{number:.*} {unit}", if number < 10.0 { 2 } else { usize::from(number < 100.0) })
}

/// Median and the middle half.
fn spread(samples: &Samples) -> String {
    format!(
        "{} ({} to {})",
        time(samples.median()),
        time(samples.quantile(0.25)),
        time(samples.quantile(0.75))
    )
}

/// Machine, date and versions.
pub(crate) fn facts(outlast: &Path) -> Result<String> {
    let line = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().with_context(|| program.to_owned())?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        anyhow::Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    };
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let count = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let memory = fs::read_to_string("/proc/meminfo")?;
    let memory: u64 = memory.split_ascii_whitespace().nth(1).context("no memory")?.parse()?;
    let load = fs::read_to_string("/proc/loadavg")?;
    let version = |package: &str| {
        let version = line("dpkg-query", &["-W", "-f", "${Version}", package])?;
        anyhow::Ok(format!("{package} {version}"))
    };
    let packages = ["net-tools", "iproute2", "tini", "dumb-init", "catatonit", "valgrind"].map(version);
    let packages = packages.into_iter().collect::<Result<Vec<_>>>()?.join(", ");
    let buckets = hash_buckets()
        .map_or(String::new(), |buckets| format!(", {buckets} buckets for established connections"));
    Ok(format!(
        "- Date: {}\n- Machine: {} of {}, {} GiB, shared with other work; load at the start {}\n\
         - Kernel: {}{buckets}\n- {}, built by {}\n- Peers: {packages}\n",
        line("date", &["-u", "+%Y-%m-%d"])?,
        if count == 1 { "1 core".to_owned() } else { format!("{count} cores") },
        model.map_or("an unknown model", |(_, model)| model),
        memory / 1024 / 1024,
        load.split_ascii_whitespace().next().unwrap_or_default(),
        line("uname", &["-sr"])?,
        line(&outlast.to_string_lossy(), &["--version"])?,
        line("rustc", &["--version"])?,
    ))
}

/// As the kernel's log says at its start, if it still does.
fn hash_buckets() -> Option<u64> {
    let output = Command::new("dmesg").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_once("TCP established hash table entries: ")?.1.split_ascii_whitespace().next()?.parse().ok()
}

/// The budgets, with what was measured.
pub(crate) fn budgets(measured: &Measured) -> Result<String> {
    let most = measured.looks.last().context("no looks")?;
    let none = measured.looks.first().context("no looks")?;
    let median = |look: &Look, name: &str| anyhow::Ok(of(&look.samples, name)?.median());
    let diag = median(most, "diag")?;
    let hold = |name: &str, listen: bool| {
        let hold = measured.holds.iter().find(|hold| hold.listen == listen).context("no hold")?;
        anyhow::Ok(of(&hold.samples, name)?.median())
    };
    let worst = |source: &str| {
        let of_source = measured.release.iter().filter(|release| release.name.contains(source));
        of_source.map(|release| release.samples.quantile(0.99)).fold(0.0, f64::max)
    };
    let rss = |index: usize| -> Result<f64> {
        let idle = measured.idle.get(index).context("no init")?;
        #[allow(clippy::cast_precision_loss)]
        Ok(*idle.memory.get("Rss").context("no Rss")? as f64)
    };
    let start = |index: usize| anyhow::Ok(measured.times.get(index).context("no init")?[0].median());
    let kib = |kib: f64| format!("{kib:.0} KiB");
    #[allow(clippy::cast_precision_loss)]
    let (bytes, wakeups) = (measured.bytes as f64, measured.idle.first().context("no init")?.wakeups as f64);
    let mut table = "| what | measured | at most | ratio | |\n|---|---|---|---|---|\n".to_owned();
    let mut row = |what: &str, measured: f64, most: f64, show: &dyn Fn(f64) -> String| {
        let met = if measured <= most { "met" } else { "**not met**" };
        let ratio = if most > 0.0 { format!("{:.2}", measured / most) } else { "–".to_owned() };
        let _ = writeln!(table, "| {what} | {} | {} | {ratio} | {met} |", show(measured), show(most));
    };
    row("static binary, x86_64", bytes, SIZE_BUDGET, &|bytes| kib(bytes / KIB));
    let netstat = median(most, "netstat")? / 1_000.0;
    row(
        "one look while listeners hold, 9,000 connections: 1/1000 of the netstat loop's",
        diag,
        netstat,
        &time,
    );
    row("the same: 3 times a bare kernel dump of the listeners", diag, 3.0 * median(most, "dump")?, &time);
    row("the same: 1.5 times that without connections", diag, 1.5 * median(none, "diag")?, &time);
    let percent = |part: f64| format!("{:.2} % of a core", part * 100.0);
    let part = |cpu: f64| cpu / f64::from(crate::HOLD);
    row(
        "CPU over a hold of 20 s, 20 listeners, 9,000 connections (diag)",
        part(hold("diag", true)?),
        0.01,
        &percent,
    );
    row("the same (proc)", part(hold("proc", true)?), 0.01, &percent);
    row("the same where only connections hold (diag)", part(hold("diag", false)?), 0.01, &percent);
    row("the same where only connections hold (proc)", part(hold("proc", false)?), 0.01, &percent);
    row(
        "last holder's end to forwarded signal, 99th percentile (diag)",
        worst("diag"),
        SETTLE + 0.025,
        &time,
    );
    row("the same (proc; settle and the longest poll)", worst("proc"), SETTLE + LONGEST_POLL, &time);
    row("resident memory while idle: tini-static's", rss(0)?, rss(1)?, &kib);
    row("wake-ups while idle, in 10 s", wakeups, 0.0, &|count| format!("{count:.0}"));
    row("start-up to the child's exec: tini-static's plus 1 ms", start(0)?, start(1)? + 1e-3, &time);
    Ok(table)
}

pub(crate) fn write(measured: &Measured) -> Result<String> {
    let mut text = format!(
        "# Benchmarks\n\nMade by `scripts/bench`, all in one run; the peers took turns, so that each had the same \
         moods of the machine. A\nfigure is a median, and in brackets is the middle half of the samples.\n\n{}\n\
         ## Budgets\n\n{}\n",
        measured.facts,
        budgets(measured)?
    );
    text += &fs::read_to_string(repository().join("benches/notes.md"))?;
    text += "\n## One look\n\nCPU time, kernel's and own, of one look at a Pod with 20 listeners (12 the application's), while \
             they hold. Half of\nthe connections are Envoy's: a process of that name. For what runs as processes it is their \
             user and system time, for\nthe rest that of the thread over 10 to 100 looks in a row (`CLOCK_THREAD_CPUTIME_ID`). \
             \"Connections alone\" is with\nlisteners that do not hold.\n\n![cost against connections](benchmarks.svg)\n\n";
    text += "| connections |";
    for look in &measured.looks {
        write!(text, " {} |", look.connections)?;
    }
    text += "\n|---|";
    text += &"---|".repeat(measured.looks.len());
    for (name, words) in NAMES {
        write!(text, "\n| {words} |")?;
        for look in &measured.looks {
            write!(text, " {} |", spread(of(&look.samples, name)?))?;
        }
    }
    let [diag, proc] = measured.instructions;
    write!(
        text,
        "\n\nInstructions of one look in user space, 200 connections, counted by callgrind: {diag:.0} with diag, \
         {proc:.0} with proc.\n\n## A hold of 20 s beside 9,000 connections\n\nCPU time of the process and its children, from \
         its start to its end; all ran beside each other.\n\n| | listeners and connections hold | connections alone \
         hold |\n|---|---|---|\n"
    )?;
    for (name, words) in [("diag", "outlast, diag"), ("proc", "outlast, proc"), ("netstat", "netstat loop")] {
        write!(text, "| {words} |")?;
        for listen in [true, false] {
            let hold = measured.holds.iter().find(|hold| hold.listen == listen).context("no hold")?;
            let cpu = of(&hold.samples, name).map(|samples| format!("{:.2} s", samples.median()));
            write!(text, " {} |", cpu.unwrap_or("does not see them".to_owned()))?;
        }
        text.push('\n');
    }
    text += "\n## From the last holder's end to the forwarded signal\n\n`outlast run` with its defaults, whose settle time of \
             200 ms is part of each figure; for the loop, to its end. 200 runs\neach, at all phases of the poll. The bare sleep shows what the machine adds to any wait.\n\n\
             | | median | 99th percentile | longest |\n|---|---|---|---|\n";
    for Release { name, samples } in &measured.release {
        let figures = [samples.median(), samples.quantile(0.99), samples.quantile(1.0)].map(time);
        writeln!(text, "| {name} | {} |", figures.join(" | "))?;
        anyhow::ensure!(samples.len() >= 200, "only {} runs of {name}", samples.len());
    }
    text += "\n## As an init\n\nIdle around a command that sleeps; wake-ups are voluntary context switches over 10 s. Start: \
             from before the spawn to the\ncommand's first instruction; end: from the command's last to the init's; 500 runs, \
             in turn. Orphans: PID 1 of a\nnamespace, 1,000 that end at one time.\n\n\
             | | RSS | anonymous | PSS | wake-ups | start | end | orphans reaped a second |\n|---|---|---|---|---|---|---|---|\n";
    for (index, name) in measured.names.iter().enumerate() {
        let idle = measured.idle.get(index).context("no init")?;
        let memory = |name: &str| idle.memory.get(name).copied().unwrap_or_default();
        let [start, end] = measured.times.get(index).context("no init")?;
        let reaped = measured.reaped.get(index).context("no init")?.median();
        writeln!(
            text,
            "| {name} | {} KiB | {} KiB | {} KiB | {} | {} | {} | {reaped:.0} |",
            memory("Rss"),
            memory("Anonymous"),
            memory("Pss"),
            idle.wakeups,
            spread(start),
            spread(end),
        )?;
    }
    text.push('\n');
    text += &fs::read_to_string(repository().join("benches/size.md"))?;
    Ok(text)
}

/// What looks, and how the tables call it.
pub(crate) const NAMES: [(&str, &str); 7] = [
    ("netstat", "netstat loop's body"),
    ("ss", "`ss -ltnpH`"),
    ("proc", "outlast, proc"),
    ("diag", "outlast, diag"),
    ("proc-complete", "outlast, proc, connections alone"),
    ("diag-complete", "outlast, diag, connections alone"),
    ("dump", "bare kernel dump of the listeners"),
];
