//! Servers in the client's namespace: what the application calls.

use crate::http;
use crate::pod::Pod;
use anyhow::Result;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::io::{self, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Longer than any client is silent.
const SILENCE: Duration = Duration::from_secs(120);

/// An HTTP server that remembers its calls.
#[derive(Debug)]
pub struct Upstream(Arc<Mutex<Vec<(Instant, String)>>>);

impl Upstream {
    /// When which path was called.
    pub fn calls(&self) -> Vec<(Instant, String)> {
        self.0.lock().unwrap().clone()
    }
}

/// A server that answers nothing and keeps what it receives.
#[derive(Debug)]
pub struct Sink(Arc<Kept>);

/// The bytes, and whether there are more.
type Kept = (Mutex<Vec<u8>>, Condvar);

impl Sink {
    /// What it has received, without TLS, as soon as that is `len` bytes or more.
    pub fn received(&self, len: usize, at_most: Duration) -> Vec<u8> {
        let few = |bytes: &mut Vec<u8>| bytes.len() < len;
        self.0.1.wait_timeout_while(self.0.0.lock().unwrap(), at_most, few).unwrap().0.clone()
    }
}

impl Pod {
    /// Serves HTTP on `port` of the client's addresses, as long as the Pod lives. `?ms=N` in a path is how long the
    /// answer takes.
    pub fn upstream(&self, port: u16) -> Result<Upstream> {
        let calls = Arc::<Mutex<Vec<_>>>::default();
        let upstream = Upstream(Arc::clone(&calls));
        self.serve(port, move |stream| answer(stream, &calls))?;
        Ok(upstream)
    }

    /// Serves TLS on `port`; each handshake begins after `delay`.
    pub fn tls_upstream(&self, port: u16, delay: Duration) -> Result<Sink> {
        let made = rcgen::generate_simple_self_signed(vec!["upstream".to_owned()])?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.signing_key.serialize_der()));
        let config = ServerConfig::builder().with_no_client_auth();
        let config = Arc::new(config.with_single_cert(vec![made.cert.der().clone()], key)?);
        let received = Arc::<Kept>::default();
        let upstream = Sink(Arc::clone(&received));
        self.serve(port, move |stream| {
            thread::sleep(delay);
            let session = ServerConnection::new(Arc::clone(&config)).map_err(io::Error::other)?;
            keep(&mut StreamOwned::new(session, stream), &received)
        })?;
        Ok(upstream)
    }

    /// Accepts on `port` and reads.
    pub fn tcp_upstream(&self, port: u16) -> Result<Sink> {
        let received = Arc::<Kept>::default();
        let upstream = Sink(Arc::clone(&received));
        self.serve(port, move |mut stream| keep(&mut stream, &received))?;
        Ok(upstream)
    }

    /// Accepts on `port` in the client's namespace, each connection in a thread of its own.
    fn serve(
        &self,
        port: u16,
        each: impl Fn(TcpStream) -> io::Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        let listener = self.client.run(|| TcpListener::bind(("::", port)))?;
        self.upstreams.lock().unwrap().push(listener.try_clone()?);
        let (each, log) = (Arc::new(each), self.log_handle());
        thread::spawn(move || {
            // Ends with the Pod, which shuts it down.
            while let Ok((stream, _)) = listener.accept() {
                // Nothing tells that the Pod's network is gone.
                let _ = stream.set_read_timeout(Some(SILENCE));
                let each = Arc::clone(&each);
                let log = Arc::clone(&log);
                thread::spawn(move || match each(stream) {
                    // How a connection ends.
                    Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
                        log.push("upstream", error.to_string());
                    }
                    _ => {}
                });
            }
        });
        Ok(())
    }
}

fn keep(stream: &mut impl Read, received: &Kept) -> io::Result<()> {
    let mut bytes = [0; 1024];
    loop {
        let got = stream.read(&mut bytes)?;
        if got == 0 {
            return Ok(());
        }
        received.0.lock().unwrap().extend_from_slice(&bytes[..got]);
        received.1.notify_all();
    }
}

fn answer(stream: TcpStream, calls: &Mutex<Vec<(Instant, String)>>) -> io::Result<()> {
    let mut to = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    loop {
        let request = http::read(&mut from)?;
        let path = request.request().1.to_owned();
        let delay = path.split_once("?ms=").and_then(|(_, ms)| ms.parse().ok()).unwrap_or(0);
        calls.lock().unwrap().push((Instant::now(), path));
        thread::sleep(Duration::from_millis(delay));
        http::respond(&mut to, "200 OK", b"")?;
    }
}
