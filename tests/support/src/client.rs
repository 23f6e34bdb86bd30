//! Clients in the client's namespace. Each records what it was promised and what it got.

use crate::http;
use crate::http2;
use crate::pod::Pod;
use nix::sched::{CloneFlags, setns};
use socket2::{Domain, Socket, Type};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a client waits for a connection.
pub(crate) const CONNECT: Duration = Duration::from_secs(10);
/// How often a client that waits for bytes looks whether the Pod is gone.
pub(crate) const LOOK: Duration = Duration::from_secs(1);
/// How many bytes the application sends on a connection that it then half-closes.
pub const HALF_CLOSING: usize = 4096;

/// One request as its client saw it.
#[derive(Clone, Debug)]
pub struct Request {
    pub started: Instant,
    pub ended: Instant,
    /// The length of the answer's body, or why there was none.
    pub result: Result<usize, String>,
    /// The answer asked the client to leave: `connection: close`.
    pub close: bool,
}

/// Which clients make a load.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// So many new requests a second, each on a connection of its own, however long the answers take.
    PerSecond(u32),
    /// So many clients with a kept-alive connection and five requests a second each. They open a new connection when
    /// the answer says `connection: close`.
    KeepAlive(u32),
    /// So many new requests a second by HTTP/2 without TLS, all on one connection as long as that takes new ones.
    Http2(u32),
    /// So many clients of the application's `--tcp` with a connection each, on which five lines a second are echoed.
    Echo(u32),
    /// So many new connections a second to `--tcp`, each half-closed by the client before it is answered; the number of
    /// milliseconds that takes is in the path's `?ms=`.
    HalfClosed(u32),
    /// The same, half-closed by the application, while the client still sends for that long.
    HalfClosing(u32),
}

/// Clients that make requests until they hear of the Pod's removal.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    addr: SocketAddr,
    path: String,
    /// When the clients hear of the Pod's removal, as far as that is known.
    hear_at: Mutex<Option<Instant>>,
    heard: Condvar,
    gone: Arc<AtomicBool>,
    requests: Mutex<Requests>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Requests {
    in_flight: usize,
    done: Vec<Request>,
}

impl Load {
    /// The clients make no new request from then on.
    pub fn hear_at(&self, at: Instant) {
        *self.shared.hear_at.lock().unwrap() = Some(at);
        self.shared.heard.notify_all();
    }

    /// Waits until `count` requests are on their way or answered.
    pub fn wait_started(&self, count: usize, at_most: Duration) -> bool {
        let few = |requests: &mut Requests| requests.done.len() + requests.in_flight < count;
        let requests = self.shared.requests.lock().unwrap();
        !self.shared.changed.wait_timeout_while(requests, at_most, few).unwrap().1.timed_out()
    }

    /// Waits for the last answers. Without `hear_at` the clients hear of the removal now.
    pub fn finish(self) -> Vec<Request> {
        self.shared.hear_at.lock().unwrap().get_or_insert_with(Instant::now);
        self.shared.heard.notify_all();
        for thread in self.threads {
            thread.join().unwrap();
        }
        let requests = self.shared.requests.lock().unwrap();
        let mut requests = self.shared.changed.wait_while(requests, |r| r.in_flight > 0).unwrap();
        let mut done = std::mem::take(&mut requests.done);
        done.sort_by_key(|request| request.started);
        done
    }
}

impl Shared {
    /// Waits until `due`; false if the clients hear of the removal first.
    fn wait_until(&self, due: Instant) -> bool {
        let mut hear_at = self.hear_at.lock().unwrap();
        loop {
            let now = Instant::now();
            if hear_at.is_some_and(|at| at <= now) {
                return false;
            }
            if due <= now {
                return true;
            }
            let until = hear_at.map_or(due, |at| at.min(due));
            hear_at = self.heard.wait_timeout(hear_at, until - now).unwrap().0;
        }
    }

    fn begin(&self) -> Instant {
        self.requests.lock().unwrap().in_flight += 1;
        self.changed.notify_all();
        Instant::now()
    }

    fn end(&self, started: Instant, result: io::Result<(usize, bool)>) {
        let close = matches!(result, Ok((_, true)));
        let result = result.map(|(body, _)| body).map_err(|error| error.to_string());
        let mut requests = self.requests.lock().unwrap();
        requests.in_flight -= 1;
        requests.done.push(Request { started, ended: Instant::now(), result, close });
        self.changed.notify_all();
    }

    /// One request by HTTP/1.1, on the connection that is kept or on a new one.
    fn one(&self, keep: &mut Option<Connection>) -> io::Result<(usize, bool)> {
        let mut connection = match keep.take() {
            Some(connection) => connection,
            None => Connection::open(self.addr, &self.gone)?,
        };
        let (body, close) = connection.get(&self.path)?;
        if !close {
            *keep = Some(connection);
        }
        Ok((body, close))
    }

    /// Each request in a thread of its own.
    fn open_loop(
        self: &Arc<Self>,
        per_second: u32,
        request: impl Fn(&Self) -> io::Result<(usize, bool)> + Send + Sync + 'static,
    ) {
        let request = Arc::new(request);
        let pause = Duration::from_secs(1) / per_second;
        let mut due = Instant::now();
        while self.wait_until(due) {
            due += pause;
            let (shared, request, started) = (Arc::clone(self), Arc::clone(&request), self.begin());
            let thread = thread::Builder::new().stack_size(128 * 1024);
            thread.spawn(move || shared.end(started, request(&shared))).expect("a thread");
        }
    }

    /// Five requests a second, one after the other.
    fn closed_loop(&self, mut request: impl FnMut() -> io::Result<(usize, bool)>) {
        let mut due = Instant::now();
        while self.wait_until(due) {
            due += Duration::from_millis(200);
            let started = self.begin();
            self.end(started, request());
        }
    }

    fn echo(&self, keep: &mut Option<Connection>) -> io::Result<(usize, bool)> {
        let mut connection = if let Some(connection) = keep.take() {
            connection
        } else {
            let mut new = Connection::open(self.addr, &self.gone)?;
            new.to.write_all(b"echo\n")?;
            new
        };
        connection.to.write_all(b"again\n")?;
        let mut line = String::new();
        connection.from.read_line(&mut line)?;
        *keep = Some(connection);
        if line == "again\n" { Ok((line.len(), false)) } else { Err(io::Error::other(format!("{line:?}"))) }
    }

    /// The milliseconds in the path.
    fn delay(&self) -> &str {
        self.path.split_once('=').map_or("0", |(_, ms)| ms)
    }

    fn half_closed(&self) -> io::Result<(usize, bool)> {
        let mut connection = Connection::open(self.addr, &self.gone)?;
        connection.to.write_all(format!("half-closed {}\nall there is\n", self.delay()).as_bytes())?;
        connection.to.shutdown(Shutdown::Write)?;
        let mut answer = String::new();
        connection.from.read_to_string(&mut answer)?;
        if answer == "13\n" { Ok((answer.len(), true)) } else { Err(io::Error::other(format!("{answer:?}"))) }
    }

    /// That the last line arrives only the application can know.
    fn half_closing(&self) -> io::Result<(usize, bool)> {
        let mut connection = Connection::open(self.addr, &self.gone)?;
        connection.to.write_all(b"half-closing\n")?;
        let mut answer = Vec::new();
        connection.from.read_to_end(&mut answer)?;
        thread::sleep(Duration::from_millis(self.delay().parse().map_err(io::Error::other)?));
        connection.to.write_all(b"the last\n")?;
        let all = answer.len() == HALF_CLOSING;
        if all { Ok((answer.len(), true)) } else { Err(io::Error::other(format!("{} bytes", answer.len()))) }
    }
}

impl Pod {
    /// Starts clients of `url`, such as `http://10.9.0.2:8080/delay?ms=9000`.
    pub fn load(&self, url: &str, pace: Pace) -> Load {
        let (addr, path) = http::parse(url).expect("http://ADDRESS:PORT/path");
        let shared = Arc::new(Shared {
            addr,
            path: path.to_owned(),
            hear_at: Mutex::default(),
            heard: Condvar::new(),
            gone: Arc::clone(&self.gone),
            requests: Mutex::default(),
            changed: Condvar::new(),
        });
        let clients = if let Pace::KeepAlive(clients) | Pace::Echo(clients) = pace { clients } else { 1 };
        let client = |_| {
            let shared = Arc::clone(&shared);
            self.client_thread(move || match pace {
                Pace::PerSecond(n) => shared.open_loop(n, |shared| shared.one(&mut None)),
                Pace::HalfClosed(n) => shared.open_loop(n, Shared::half_closed),
                Pace::HalfClosing(n) => shared.open_loop(n, Shared::half_closing),
                Pace::Http2(n) => {
                    let client = http2::Client::new(shared.addr, Arc::clone(&shared.gone));
                    shared.open_loop(n, move |shared| client.get(&shared.path));
                }
                Pace::KeepAlive(_) => {
                    let mut connection = None;
                    shared.closed_loop(|| shared.one(&mut connection));
                }
                Pace::Echo(_) => {
                    let mut connection = None;
                    shared.closed_loop(|| shared.echo(&mut connection));
                }
            })
        };
        let threads = (0..clients).map(client).collect();
        Load { shared, threads }
    }

    /// Starts a GET of `url` whose answer is read at `rate` bytes a second through a small receive buffer.
    pub fn slow_reader(&self, url: &str, rate: u32) -> SlowReader {
        let (addr, path) = http::parse(url).expect("http://ADDRESS:PORT/path");
        let (path, gone) = (path.to_owned(), Arc::clone(&self.gone));
        let connect = || -> io::Result<Connection> {
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
            // Before the handshake, for it sets the window's scale.
            socket.set_recv_buffer_size(16 * 1024)?;
            socket.connect_timeout(&addr.into(), CONNECT)?;
            Connection::new(socket.into(), addr, &gone)
        };
        let mut connection = self.client.run(connect).expect("the slow client connects");
        let port = connection.port;
        let started = Instant::now();
        http::get(&mut connection.to, addr, &path).expect("the slow client asks");
        // The answer is on its way when this returns.
        connection.from.fill_buf().expect("the slow client is answered");
        let received = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&received);
        let thread = thread::spawn(move || {
            let result = connection.read_slowly(rate, count).map_err(|error| error.to_string());
            Request { started, ended: Instant::now(), result, close: false }
        });
        SlowReader { port, received, thread }
    }

    /// A thread in the client's namespace.
    pub(crate) fn client_thread<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let netns = self.client.file();
        thread::spawn(move || {
            setns(&*netns, CloneFlags::CLONE_NEWNET).expect("setns");
            f()
        })
    }
}

/// A client that reads slowly.
#[derive(Debug)]
pub struct SlowReader {
    /// Its local port.
    pub port: u16,
    received: Arc<AtomicUsize>,
    thread: JoinHandle<Request>,
}

impl SlowReader {
    /// Waits for the answer's end or the Pod's.
    pub fn finish(self) -> Request {
        self.thread.join().unwrap()
    }

    /// Waits likewise; how many of the answer's `len` bytes did not arrive.
    pub fn missing(self, len: usize) -> usize {
        let received = Arc::clone(&self.received);
        match self.finish().result {
            Ok(got) => len - got,
            // The head counts as a part of the answer: it is short.
            Err(_) => len.saturating_sub(received.load(Ordering::Relaxed)).max(1),
        }
    }
}

struct Connection {
    addr: SocketAddr,
    port: u16,
    to: TcpStream,
    from: BufReader<Patient>,
}

/// Waits for bytes as long as the Pod's network exists.
struct Patient {
    stream: TcpStream,
    gone: Arc<AtomicBool>,
}

impl Read for Patient {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            // Looked at before the read: what had arrived by then is still delivered.
            let gone = self.gone.load(Ordering::Relaxed);
            match self.stream.read(buf) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !gone => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::other("cut: the Pod's network is gone"));
                }
                done => return done,
            }
        }
    }
}

impl Connection {
    fn open(addr: SocketAddr, gone: &Arc<AtomicBool>) -> io::Result<Self> {
        Self::new(TcpStream::connect_timeout(&addr, CONNECT)?, addr, gone)
    }

    fn new(stream: TcpStream, addr: SocketAddr, gone: &Arc<AtomicBool>) -> io::Result<Self> {
        stream.set_read_timeout(Some(LOOK))?;
        let (port, to) = (stream.local_addr()?.port(), stream.try_clone()?);
        // A large read would open the window in one step.
        let from = BufReader::with_capacity(4096, Patient { stream, gone: Arc::clone(gone) });
        Ok(Self { addr, port, to, from })
    }

    /// The length of the answer's body, and whether the connection ends with it.
    fn get(&mut self, path: &str) -> io::Result<(usize, bool)> {
        http::get(&mut self.to, self.addr, path)?;
        let answer = http::read(&mut self.from)?;
        if answer.status() == 200 {
            Ok((answer.body.len(), answer.close))
        } else {
            Err(io::Error::other(answer.start))
        }
    }

    fn read_slowly(self, rate: u32, received: Arc<AtomicUsize>) -> io::Result<usize> {
        let paced = Paced { inner: self.from, rate, owed: Instant::now(), received };
        let mut paced = BufReader::with_capacity(4096, paced);
        let answer = http::read(&mut paced)?;
        let _ = self.to.shutdown(Shutdown::Both);
        Ok(answer.body.len())
    }
}

/// Passes on `rate` bytes a second, at most 4096 at once.
struct Paced {
    inner: BufReader<Patient>,
    rate: u32,
    owed: Instant,
    received: Arc<AtomicUsize>,
}

impl Read for Paced {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        thread::sleep(self.owed.saturating_duration_since(Instant::now()));
        let most = buf.len().min(4096);
        let got = self.inner.read(&mut buf[..most])?;
        self.received.fetch_add(got, Ordering::Relaxed);
        // A pause of the sender's is not made up for by more than this one read.
        self.owed = self.owed.max(Instant::now());
        let got_u32 = u32::try_from(got).unwrap_or(u32::MAX);
        self.owed += Duration::from_secs(1) * got_u32 / self.rate;
        Ok(got)
    }
}
