//! An application that serves HTTP/1.1, HTTP/2 and plain TCP or works, and stops in the way that its flags say. A Job
//! (`--job 3s`) works for so long without being stopped, and exits with `--status`.
//!
//! On SIGTERM, in this order: serve `--serve-more`, with `--blink` with one listener more now and then; with `--reload`
//! close the listeners and open them again after so long; send a record to `--record` and close that connection at once;
//! close the listeners; finish the requests in flight; make the last request on the connection of `--worker` or, with
//! `--silent`, close it; work for `--silent` without a socket; make `--last-call`. Exits 0 if those succeeded and no client
//! of `--tcp` was cut, 1 if not. It says what it does on stderr.
//!
//! `--workers N` are so many processes that do the same, under one that passes the signal on; `--each-closed` ends a
//! connection after its first answer.

use anyhow::{Context, Result};
use lexopt::{Arg, ValueExt};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe};
use pod::{http, http2};
use socket2::{Domain, Socket, Type};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;
use tokio::sync::watch;

/// Long enough never to be what a test measures.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long `--blink`'s listener is there, and how long it is not.
const BLINK: Duration = Duration::from_millis(100);

#[derive(Clone, Default)]
struct Options {
    listen: Vec<SocketAddr>,
    tcp: Vec<SocketAddr>,
    workers: usize,
    each_closed: bool,
    serve_more: Duration,
    blink: Option<SocketAddr>,
    reload: Option<Duration>,
    never_stop: bool,
    record: Option<SocketAddr>,
    worker: Option<SocketAddr>,
    silent: Option<Duration>,
    last_call: Option<String>,
    job: Option<Duration>,
    status: u8,
}

/// What the threads of a process share.
struct Server {
    options: Options,
    /// The number of requests in flight, and of connections by HTTP/2 or `--tcp`.
    in_flight: Mutex<usize>,
    fewer: Condvar,
    /// Whether HTTP/2's connections are to end.
    stop: watch::Sender<bool>,
    /// A client of `--tcp` was cut.
    cut: AtomicBool,
}

/// When there were sockets: nanoseconds of `CLOCK_MONOTONIC`, from after the first was opened to before the last was closed.
static SPANS: Mutex<Spans> = Mutex::new(Spans { open: 0, since: 0, over: Vec::new() });

struct Spans {
    open: usize,
    since: u64,
    over: Vec<(u64, u64)>,
}

/// Counts a socket, and is dropped right before it.
struct Counted;

impl Counted {
    fn new() -> Self {
        let mut spans = SPANS.lock().unwrap();
        if spans.open == 0 {
            spans.since = now();
        }
        spans.open += 1;
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut spans = SPANS.lock().unwrap();
        spans.open -= 1;
        if spans.open == 0 {
            let span = (spans.since, now());
            spans.over.push(span);
        }
    }
}

/// One line in one write: those of several processes do not mix.
macro_rules! say {
    ($($text:tt)*) => {{
        let line = format!($($text)*) + "\n";
        // Nobody reads it any more.
        let _ = io::stderr().write_all(line.as_bytes());
    }};
}

fn now() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).map(Duration::from);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

fn main() -> Result<ExitCode> {
    let mut stop = SigSet::empty();
    stop.add(Signal::SIGTERM);
    stop.thread_block()?;
    let options = parse()?;
    if options.workers == 0 {
        return serve_and_stop(options, &stop, || say!("ready"));
    }
    // SAFETY of the forks below: this process has one thread.
    let (started, start) = pipe()?;
    let mut workers = Vec::new();
    for _ in 0..options.workers {
        // SAFETY: as above.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => workers.push(child),
            ForkResult::Child => {
                let ready = || File::from(start).write_all(b".").expect("the parent lives");
                return serve_and_stop(options, &stop, ready);
            }
        }
    }
    drop(start);
    File::from(started).read_exact(&mut vec![0; workers.len()]).context("a worker has not started")?;
    say!("ready");
    lead(&workers, &stop)
}

/// Passes the stop signal on to the workers; the worst of their statuses.
fn lead(workers: &[Pid], stop: &SigSet) -> Result<ExitCode> {
    stop.wait()?;
    for worker in workers {
        kill(*worker, Signal::SIGTERM)?;
    }
    let mut fine = true;
    for worker in workers {
        fine &= waitpid(*worker, None)? == WaitStatus::Exited(*worker, 0);
    }
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn serve_and_stop(options: Options, stop: &SigSet, ready: impl FnOnce()) -> Result<ExitCode> {
    let server = Arc::new(Server {
        options,
        in_flight: Mutex::default(),
        fewer: Condvar::new(),
        stop: watch::channel(false).0,
        cut: AtomicBool::new(false),
    });
    let options = &server.options;
    let mut listeners = open(&server)?;
    let worker = options.worker.map(connect_worker);
    ready();

    if let Some(time) = options.job {
        thread::sleep(time);
        say!("the job is done");
        return Ok(ExitCode::from(options.status));
    }
    stop.wait()?;
    say!("stop signal");
    if options.never_stop {
        loop {
            stop.wait()?;
        }
    }
    serve_more(options)?;
    if let Some(gap) = options.reload {
        close(listeners);
        let closed = now();
        thread::sleep(gap);
        listeners = open(&server)?;
        let gap = Duration::from_nanos(now() - closed);
        say!("listening again gap={}", gap.as_secs_f64());
        serve_more(options)?;
    }
    if let Some(addr) = options.record {
        let mut stream = TcpStream::connect(addr)?;
        let _counted = Counted::new();
        stream.write_all(b"the record\n")?;
        say!("record sent and closed");
    }
    close(listeners);
    say!("listeners closed");
    server.stop.send_replace(true);
    let left = server.in_flight.lock().unwrap();
    drop(server.fewer.wait_while(left, |left| *left > 0).unwrap());
    say!("requests finished");
    let mut fine = !server.cut.load(SeqCst);
    if let Some(silent) = options.silent {
        drop(worker);
        say!("works in silence");
        thread::sleep(silent);
    } else if let (Some((mut stream, _counted)), Some(addr)) = (worker, options.worker) {
        fine &= report("last request", &ask(&mut stream, addr, "/last"));
    }
    if let Some(url) = &options.last_call {
        fine &= report("last call", &call(url));
    }
    // What is still open closes with the process.
    let exits = now();
    let mut spans = SPANS.lock().unwrap();
    if spans.open > 0 {
        let span = (spans.since, exits);
        spans.over.push(span);
    }
    let spans: Vec<_> = spans.over.iter().map(|(from, to)| format!("{from}-{to}")).collect();
    say!("exits at={exits} sockets={}", spans.join(","));
    Ok(if fine { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Serves on, with a listener that comes and goes if there is to be one.
fn serve_more(options: &Options) -> Result<()> {
    let Some(addr) = options.blink else {
        thread::sleep(options.serve_more);
        return Ok(());
    };
    let mut left = options.serve_more;
    while !left.is_zero() {
        let listener = listen(addr)?;
        thread::sleep(BLINK);
        drop(listener);
        thread::sleep(BLINK);
        left = left.saturating_sub(2 * BLINK);
    }
    Ok(())
}

fn open(server: &Arc<Server>) -> Result<Vec<(Counted, TcpListener)>> {
    let Options { listen: http, tcp, .. } = &server.options;
    let http = http.iter().map(|addr| (*addr, serve as Serve));
    let tcp = tcp.iter().map(|addr| (*addr, serve_tcp as Serve));
    let start = |(addr, serve): (SocketAddr, Serve)| {
        let listener = listen(addr).with_context(|| addr.to_string())?;
        let (accepts, server) = (listener.try_clone()?, Arc::clone(server));
        thread::spawn(move || accept(&accepts, &server, serve));
        Ok((Counted::new(), listener))
    };
    http.chain(tcp).map(start).collect()
}

/// Several processes may listen on one address, and one process with several sockets.
fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

fn close(listeners: Vec<(Counted, TcpListener)>) {
    for (counted, listener) in listeners {
        drop(counted);
        // Ends the accept of the listener's thread as well, and so the last descriptor.
        let _ = Socket::from(listener).shutdown(Shutdown::Both);
    }
}

fn parse() -> Result<Options> {
    let mut options = Options::default();
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("listen") => options.listen.push(parser.value()?.parse()?),
            Arg::Long("tcp") => options.tcp.push(parser.value()?.parse()?),
            Arg::Long("workers") => options.workers = parser.value()?.parse()?,
            Arg::Long("each-closed") => options.each_closed = true,
            Arg::Long("serve-more") => options.serve_more = seconds(&parser.value()?.string()?)?,
            Arg::Long("blink") => options.blink = Some(parser.value()?.parse()?),
            Arg::Long("reload") => options.reload = Some(seconds(&parser.value()?.string()?)?),
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
fn connect_worker(addr: SocketAddr) -> (TcpStream, Counted) {
    loop {
        let first = || -> Result<(TcpStream, Counted)> {
            let mut stream = TcpStream::connect(addr)?;
            let counted = Counted::new();
            ask(&mut stream, addr, "/first")?;
            Ok((stream, counted))
        };
        match first() {
            Ok(worker) => return worker,
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

fn report(what: &str, result: &Result<()>) -> bool {
    match result {
        Ok(()) => say!("{what} made"),
        Err(error) => say!("{what} lost: {error:#}"),
    }
    result.is_ok()
}

fn call(url: &str) -> Result<()> {
    let (addr, path) = http::parse(url).context("not a URL of the fixture")?;
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_secs(5))?;
    let _counted = Counted::new();
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    ask(&mut stream, addr, path)
}

fn ask(stream: &mut TcpStream, addr: SocketAddr, path: &str) -> Result<()> {
    http::get(stream, addr, path)?;
    let answer = http::read(&mut BufReader::new(stream))?;
    anyhow::ensure!(answer.status() == 200, "{}", answer.start);
    Ok(())
}

/// What is done with a connection.
type Serve = fn(TcpStream, &Server) -> io::Result<()>;

fn accept(listener: &TcpListener, server: &Arc<Server>, serve: Serve) {
    // A listener that was shut down answers EINVAL.
    while let Ok((stream, _)) = listener.accept() {
        let counted = Counted::new();
        let server = Arc::clone(server);
        let thread = thread::Builder::new().stack_size(256 * 1024);
        let serve = move || {
            let kept = stream.try_clone();
            let done = serve(stream, &server);
            // The last descriptor goes with `kept`.
            drop(counted);
            drop(kept);
            done
        };
        thread.spawn(serve).expect("a thread");
    }
}

impl Server {
    /// Does what is in flight until it returns.
    fn in_flight<T>(&self, work: impl FnOnce() -> T) -> T {
        *self.in_flight.lock().unwrap() += 1;
        let done = work();
        *self.in_flight.lock().unwrap() -= 1;
        self.fewer.notify_all();
        done
    }
}

/// A connection by HTTP/1.1 counts as in flight from a request's first byte to its answer's last.
fn serve(stream: TcpStream, server: &Server) -> io::Result<()> {
    let mut to = stream.try_clone()?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    if stream.peek(&mut [0])? == 1 && starts_with_http2(&stream)? {
        let stop = server.stop.subscribe();
        return server.in_flight(|| http2::serve(stream, stop, answer));
    }
    let mut from = BufReader::new(stream);
    let closed = server.options.each_closed;
    while !from.fill_buf()?.is_empty() {
        server.in_flight(|| {
            let request = http::read(&mut from)?;
            let (delay, body) = answer(request.request().1);
            thread::sleep(delay);
            if closed { http::respond_last(&mut to, &body) } else { http::respond(&mut to, "200 OK", &body) }
        })?;
        if closed {
            break;
        }
    }
    Ok(())
}

/// No request of HTTP/1.1's begins with a P and an R.
fn starts_with_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut start = [0; 2];
    while stream.peek(&mut start)? == 1 {}
    Ok(start == *b"PR")
}

/// `/delay?ms=N` answers after N milliseconds, `/bytes?n=N` with N bytes, everything else at once.
fn answer(target: &str) -> (Duration, Vec<u8>) {
    let number = target.split_once('=').and_then(|(_, n)| n.parse().ok()).unwrap_or(0);
    match target.split('?').next() {
        Some("/delay") => (Duration::from_millis(number), Vec::new()),
        Some("/bytes") => (Duration::ZERO, vec![b'x'; usize::try_from(number).unwrap_or(0)]),
        _ => (Duration::ZERO, Vec::new()),
    }
}

/// A connection without HTTP is in flight for as long as it lasts.
fn serve_tcp(stream: TcpStream, server: &Server) -> io::Result<()> {
    let done = server.in_flight(|| talk(stream));
    if let Err(error) = &done {
        say!("a client was cut: {error}");
        server.cut.store(true, SeqCst);
    }
    done
}

/// The client's first line says what it wants: `echo` of every line; `half-closed N`, the number of bytes that it sends
/// before it half-closes, N milliseconds later; `half-closing`, bytes after which this side half-closes.
fn talk(mut stream: TcpStream) -> io::Result<()> {
    let mut from = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    from.read_line(&mut first)?;
    let mut words = first.split_whitespace();
    match (words.next(), words.next().and_then(|n| n.parse().ok())) {
        (Some("half-closed"), Some(delay)) => {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes)?;
            thread::sleep(Duration::from_millis(delay));
            writeln!(stream, "{}", bytes.len())
        }
        (Some("half-closing"), _) => {
            stream.write_all(&[b'x'; pod::HALF_CLOSING])?;
            stream.shutdown(Shutdown::Write)?;
            let mut last = String::new();
            from.read_to_string(&mut last)?;
            if last == "the last\n" { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        }
        (Some("echo"), _) => io::copy(&mut from, &mut stream).map(drop),
        // One that wanted nothing.
        _ => Ok(()),
    }
}
