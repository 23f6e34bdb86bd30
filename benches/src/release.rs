//! From the last holder's end to the forwarded signal: inside the Pod.

use crate::cpu::{Samples, now};
use crate::pod::named;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// What the holds wait for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    Listener,
    Connection,
}

/// Something of the application's: this process is no proxy's.
fn hold(holder: Holder) -> Result<Box<dyn std::any::Any>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    if holder == Holder::Listener {
        return Ok(Box::new(listener));
    }
    let client = TcpStream::connect(listener.local_addr()?)?;
    Ok(Box::new((client, listener.accept()?)))
}

/// Prints the times of `runs` ends of a hold by `outlast run` with a source.
pub(crate) fn outlast(program: &Path, source: &str, holder: &str, runs: u32) -> Result<()> {
    let holder = if holder == "listener" { Holder::Listener } else { Holder::Connection };
    let mut samples = Samples::default();
    for run in 0..runs {
        let held = hold(holder)?;
        let mut child = Command::new(program)
            .args(["run", &format!("--source={source}"), "--"])
            .arg(named("envoy")?)
            .args(["stamp", "wait"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("a pipe")?).lines();
        let mut log = BufReader::new(child.stderr.take().context("a pipe")?).lines();
        ensure!(lines.nth(1).context("no line")?? == "ready", "the command is not ready");
        // SAFETY: plain numbers; the child is not waited for yet.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGTERM) };
        // The first look is over; then any time between two looks is as likely as another.
        while !log.next().context("no log")??.contains(" owners ") {}
        sleep(Duration::from_millis(20 + u64::from(run * 7 % 501)));
        drop(held);
        let ended = now();
        let stopped: u64 = lines.next().context("no stamp")??.parse()?;
        samples.push((Duration::from_nanos(stopped) - ended).as_secs_f64());
        for line in log {
            line?;
        }
        ensure!(child.wait()?.success(), "the command failed");
    }
    println!("times {}", samples.to_text());
    Ok(())
}

/// Prints how long a sleep of the settle time takes: what the machine adds to every wait.
pub(crate) fn sleeps(runs: u32) {
    let mut samples = Samples::default();
    for _ in 0..runs {
        let began = now();
        sleep(Duration::from_millis(200));
        samples.push((now() - began).as_secs_f64());
    }
    println!("times {}", samples.to_text());
}

/// The same for the loop, of which some run beside each other, begun at different times.
pub(crate) fn netstat(script: &str, runs: u32) -> Result<()> {
    const BESIDE: u32 = 4;
    let mut samples = Samples::default();
    for _ in 0..runs / BESIDE {
        let held = hold(Holder::Listener)?;
        let mut loops = Vec::new();
        for _ in 0..BESIDE {
            loops.push(
                Command::new("sh").args(["-c", script]).stdin(Stdio::null()).stderr(Stdio::null()).spawn()?,
            );
            sleep(Duration::from_millis(1_000 / u64::from(BESIDE)));
        }
        drop(held);
        let ended = now();
        let waits = loops
            .into_iter()
            .map(|mut child| std::thread::spawn(move || child.wait().map(|_| (now() - ended).as_secs_f64())));
        for wait in waits.collect::<Vec<_>>() {
            samples.push(wait.join().map_err(|_| anyhow::anyhow!("a thread failed"))??);
        }
    }
    println!("times {}", samples.to_text());
    Ok(())
}
