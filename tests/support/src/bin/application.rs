//! An application that serves HTTP or works, and stops in the way that its flags say. A Job (`--job 3s`) works for so
//! long without being stopped, and exits with `--status`.
//!
//! On SIGTERM, in this order: serve `--serve-more`; send a record to `--record` and close that connection at once;
//! close the listeners; finish the requests in flight; make the last request on the connection of `--worker` or, with
//! `--silent`, close it; work for `--silent` without a socket; make `--last-call`. Exits 0 if those succeeded, 1 if
//! not. It says what it does on stderr.

use anyhow::{Context, Result};
use lexopt::{Arg, ValueExt};
use nix::sys::signal::{SigSet, Signal};
use pod::http;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// Long enough never to be what a test measures.
const TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Options {
    listen: Vec<SocketAddr>,
    serve_more: Duration,
    never_stop: bool,
    record: Option<SocketAddr>,
    worker: Option<SocketAddr>,
    silent: Option<Duration>,
    last_call: Option<String>,
    job: Option<Duration>,
    status: u8,
}

/// The number of requests in flight.
#[derive(Default)]
struct InFlight(Mutex<usize>, Condvar);

fn main() -> Result<ExitCode> {
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.thread_block()?;
    let options = parse()?;
    let in_flight = Arc::new(InFlight::default());
    let listeners =
        options.listen.iter().map(|addr| TcpListener::bind(addr).with_context(|| addr.to_string()));
    let listeners = listeners.collect::<Result<Vec<_>>>()?;
    for listener in &listeners {
        let (listener, in_flight) = (listener.try_clone()?, Arc::clone(&in_flight));
        thread::spawn(move || accept(&listener, &in_flight));
    }
    let worker = options.worker.map(connect_worker);
    eprintln!("ready");

    if let Some(time) = options.job {
        thread::sleep(time);
        eprintln!("the job is done");
        return Ok(ExitCode::from(options.status));
    }
    stop.wait()?;
    eprintln!("stop signal");
    if options.never_stop {
        loop {
            stop.wait()?;
        }
    }
    thread::sleep(options.serve_more);
    if let Some(addr) = options.record {
        TcpStream::connect(addr)?.write_all(b"the record\n")?;
        eprintln!("record sent and closed");
    }
    for listener in listeners {
        // Ends the accept of the listener's thread as well, and so the last descriptor.
        // SAFETY: a system call on a descriptor that is open.
        unsafe { libc::shutdown(listener.as_raw_fd(), libc::SHUT_RDWR) };
    }
    eprintln!("listeners closed");
    let left = in_flight.0.lock().unwrap();
    drop(in_flight.1.wait_while(left, |left| *left > 0).unwrap());
    eprintln!("requests finished");
    let mut fine = true;
    if let Some(silent) = options.silent {
        drop(worker);
        eprintln!("works in silence");
        thread::sleep(silent);
    } else if let (Some(mut stream), Some(addr)) = (worker, options.worker) {
        fine &= report("last request", &ask(&mut stream, addr, "/last"));
    }
    if let Some(url) = options.last_call {
        fine &= report("last call", &call(&url));
    }
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn parse() -> Result<Options> {
    let mut options = Options::default();
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("listen") => options.listen.push(parser.value()?.parse()?),
            Arg::Long("serve-more") => options.serve_more = seconds(&parser.value()?.string()?)?,
            Arg::Long("job") => options.job = Some(seconds(&parser.value()?.string()?)?),
            Arg::Long("status") => options.status = parser.value()?.parse()?,
            Arg::Long("silent") => options.silent = Some(seconds(&parser.value()?.string()?)?),
            Arg::Long("never-stop") => options.never_stop = true,
            Arg::Long("record") => options.record = Some(parser.value()?.parse()?),
            Arg::Long("worker") => options.worker = Some(parser.value()?.parse()?),
            Arg::Long("last-call") => options.last_call = Some(parser.value()?.string()?),
            _ => return Err(arg.unexpected().into()),
        }
    }
    Ok(options)
}

fn seconds(text: &str) -> Result<Duration> {
    let seconds = text.strip_suffix('s').context("a time is in seconds, such as 3s")?;
    Ok(Duration::try_from_secs_f64(seconds.parse()?)?)
}

/// Tries until the proxy and the upstream are there, as workers do.
fn connect_worker(addr: SocketAddr) -> TcpStream {
    loop {
        let first = || -> Result<TcpStream> {
            let mut stream = TcpStream::connect(addr)?;
            ask(&mut stream, addr, "/first")?;
            Ok(stream)
        };
        match first() {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn report(what: &str, result: &Result<()>) -> bool {
    match result {
        Ok(()) => eprintln!("{what} made"),
        Err(error) => eprintln!("{what} lost: {error:#}"),
    }
    result.is_ok()
}

fn call(url: &str) -> Result<()> {
    let (addr, path) = http::parse(url).context("not a URL of the fixture")?;
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    ask(&mut stream, addr, path)
}

fn ask(stream: &mut TcpStream, addr: SocketAddr, path: &str) -> Result<()> {
    http::get(stream, addr, path)?;
    let answer = http::read(&mut BufReader::new(stream))?;
    anyhow::ensure!(answer.status() == 200, "{}", answer.start);
    Ok(())
}

fn accept(listener: &TcpListener, in_flight: &Arc<InFlight>) {
    // A listener that was shut down answers EINVAL.
    while let Ok((stream, _)) = listener.accept() {
        let in_flight = Arc::clone(in_flight);
        let thread = thread::Builder::new().stack_size(128 * 1024);
        thread.spawn(move || serve(stream, &in_flight)).expect("a thread");
    }
}

/// A connection counts as in flight from a request's first byte to its answer's last.
fn serve(stream: TcpStream, in_flight: &InFlight) -> std::io::Result<()> {
    let mut to = stream.try_clone()?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut from = BufReader::new(stream);
    while !from.fill_buf()?.is_empty() {
        *in_flight.0.lock().unwrap() += 1;
        let done = answer(&mut from, &mut to);
        *in_flight.0.lock().unwrap() -= 1;
        in_flight.1.notify_all();
        done?;
    }
    Ok(())
}

/// `/delay?ms=N` answers after N milliseconds, `/bytes?n=N` with N bytes, everything else at once.
fn answer(from: &mut impl BufRead, to: &mut impl Write) -> std::io::Result<()> {
    let request = http::read(from)?;
    let (_, target) = request.request();
    let number = target.split_once('=').and_then(|(_, n)| n.parse().ok()).unwrap_or(0);
    let body = if target.starts_with("/bytes?") {
        vec![b'x'; usize::try_from(number).unwrap_or(0)]
    } else {
        Vec::new()
    };
    if target.starts_with("/delay?") {
        thread::sleep(Duration::from_millis(number));
    }
    http::respond(to, "200 OK", &body)
}
