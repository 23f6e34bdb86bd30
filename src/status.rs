//! `outlast status`: every socket with its owner and the verdict.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::ops::ControlFlow;
use std::time::Duration;

use crate::cli::Settings;
use crate::exit::Exit;
use crate::hold::{Proxy, Sight};
use crate::log::{Json, Log};
use crate::pod::kernel::{Kernel, Source, System, Visible};
use crate::pod::snapshot::{Judged, Observer, View};
use crate::prestop::is_outlast_run;

/// Prints what a look sees.
pub fn status(settings: &Settings, log: &Log) -> Exit {
    let mut kernel = System::open(settings.source);
    if settings.source == Source::Diag && kernel.source() != "diag" {
        log.warn("the source that was asked for cannot be had", &[("source", &kernel.source())]);
    }
    // What goes wrong here is for the look to find.
    let processes = kernel.processes().unwrap_or_default();
    let child = wrapped_command(&processes);
    let mut observer = Observer::new(kernel, settings.rules.clone(), child).with_everything();
    let view = observer.look(Duration::ZERO);
    let report = Report {
        view,
        holders: holders_of_inodes(processes),
        verdict: Verdict::of(view),
        proxy: &settings.rules.proxy,
    };
    let text = if settings.json { report.json() } else { report.text() };
    let written = text.and_then(|text| io::stdout().write_all(text.as_bytes()).map_err(|_| fmt::Error));
    match report.verdict {
        // A probe that cannot say what it saw has not seen it.
        _ if written.is_err() => Exit::Unknown,
        _ if !settings.check => Exit::Success,
        Verdict::Clear | Verdict::ProxyGone => Exit::Success,
        Verdict::Held => Exit::Held,
        Verdict::Unknown => Exit::Unknown,
    }
}

/// What a hold would do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Clear,
    Held,
    Unknown,
    ProxyGone,
}

impl Verdict {
    /// In the order in which a hold asks.
    fn of(view: &View) -> Verdict {
        match (view.proxy(), view.sight()) {
            (Proxy::Gone, _) => Verdict::ProxyGone,
            (_, Sight::Clear) => Verdict::Clear,
            (_, Sight::Held) => Verdict::Held,
            (_, Sight::Unknown) => Verdict::Unknown,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Verdict::Clear => "clear",
            Verdict::Held => "held",
            Verdict::Unknown => "unknown",
            Verdict::ProxyGone => "proxy-gone",
        }
    }
}

/// COMMAND of the `outlast run` in this container, which is the proxy whatever its name. Orphans are children of run as
/// well; COMMAND was its first.
fn wrapped_command(processes: &[Visible]) -> Option<i32> {
    let run = processes.iter().find(|process| is_outlast_run(process))?;
    processes.iter().filter(|process| process.parent == run.pid).map(|process| process.pid).min()
}

/// Which visible process has which socket. One that may not be read shows none.
fn holders_of_inodes(processes: Vec<Visible>) -> HashMap<u64, Visible> {
    let mut holders = HashMap::new();
    let mut kernel = System::open(Source::Proc);
    for process in processes {
        let _ = kernel.sockets_of(process.pid, &mut |inode| {
            holders.entry(inode).or_insert_with(|| process.clone());
            ControlFlow::Continue(())
        });
    }
    holders
}

struct Report<'a> {
    view: &'a View,
    holders: HashMap<u64, Visible>,
    verdict: Verdict,
    proxy: &'a [String],
}

const COLUMNS: [&str; 12] = [
    "PROTO", "LOCAL", "REMOTE", "STATE", "SEND-Q", "RECV-Q", "UID", "INODE", "PROCESS", "OWNER", "RULE",
    "HOLDS",
];

impl Report<'_> {
    fn sockets(&self) -> impl Iterator<Item = (&Judged, Option<&Visible>)> {
        let mut sockets: Vec<_> = self.view.sockets.iter().collect();
        // What holds first: it is what one looks for.
        sockets.sort_by_key(|socket| (socket.holds.is_none(), !socket.row.listens()));
        sockets.into_iter().map(|socket| (socket, self.holders.get(&socket.row.inode)))
    }

    fn text(&self) -> Result<String, fmt::Error> {
        let mut rows = vec![COLUMNS.map(String::from)];
        for (socket, process) in self.sockets() {
            let row = &socket.row;
            rows.push([
                row.protocol().to_string(),
                row.local.to_string(),
                row.remote.to_string(),
                row.state.to_string(),
                row.send_queue.to_string(),
                row.receive_queue.to_string(),
                row.uid.to_string(),
                row.inode.to_string(),
                process
                    .map_or("-".into(), |process| format!("{}/{}", process.pid, process.name.escape_debug())),
                socket.owner.to_string(),
                socket.rule.to_string(),
                socket.holds.map_or("-".into(), |kind| kind.to_string()),
            ]);
        }
        let mut widths = [0; COLUMNS.len()];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in &rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths) {
                write!(line, "{cell:<width$}  ")?;
            }
            writeln!(text, "{}", line.trim_end())?;
        }
        writeln!(text, "{}", self.conclusion())?;
        Ok(text)
    }

    /// What a hold would do now, and why.
    fn conclusion(&self) -> String {
        let [listeners, connections, undelivered] = self.view.counts();
        match self.verdict {
            Verdict::Clear => "A hold would end after the settle time: clear.".into(),
            Verdict::Held => format!(
                "A hold would wait: listeners {listeners}, connections {connections}, undelivered {undelivered}."
            ),
            Verdict::Unknown => format!(
                "A hold would wait, for not everything can be read: {}.",
                self.view.trouble.as_deref().unwrap_or("unknown")
            ),
            Verdict::ProxyGone => {
                format!("A hold would end at once: no process is called {}.", self.proxy.join(" or "))
            }
        }
    }

    /// The document that docs/status.schema.json describes.
    fn json(&self) -> Result<String, fmt::Error> {
        let mut text = String::from("{\"sockets\":[");
        for (index, (socket, process)) in self.sockets().enumerate() {
            let row = &socket.row;
            let comma = if index == 0 { "" } else { "," };
            let (pid, name) = process.map_or(("null".into(), "null".into()), |process| {
                (process.pid.to_string(), format!("\"{}\"", Json(&process.name)))
            });
            let holds = socket.holds.map_or("null".into(), |kind| format!("\"{kind}\""));
            write!(
                text,
                "{comma}\n{{\"protocol\":\"{}\",\"local\":\"{}\",\"remote\":\"{}\",\"state\":\"{}\",\"send_queue\":{},\
                 \"receive_queue\":{},\"uid\":{},\"inode\":{},\"pid\":{pid},\"process\":{name},\"owner\":\"{}\",\
                 \"rule\":\"{}\",\"holds\":{holds}}}",
                row.protocol(),
                row.local,
                row.remote,
                row.state,
                row.send_queue,
                row.receive_queue,
                row.uid,
                row.inode,
                socket.owner,
                socket.rule,
            )?;
        }
        let [listeners, connections, undelivered] = self.view.counts();
        let error = self.view.trouble.as_ref().map_or("null".into(), |error| format!("\"{}\"", Json(error)));
        writeln!(
            text,
            "\n],\n\"listeners\":{listeners},\"connections\":{connections},\"undelivered\":{undelivered},\
             \"verdict\":\"{}\",\"error\":{error}}}",
            self.verdict.name()
        )?;
        Ok(text)
    }
}
