//! The figures of the newest step for Prometheus, in its text form, for those on this host alone.

use super::{Described, Row};
use crate::failure::{Exit, Failure};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest that one who asks is waited for.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most who are answered at one time.
const MOST: usize = 64;
/// Longest request.
const LONGEST: usize = 1 << 13;

#[derive(Default)]
struct Newest {
    row: Option<Row>,
    validation: Option<f64>,
}

/// The endpoint. It ends with its process.
pub struct Endpoint(Arc<Mutex<Newest>>);

impl Endpoint {
    /// Listens at a port of the loopback, any free one for 0, and says where.
    pub fn open(port: u16, run: &Described<'_>) -> Result<Self, Failure> {
        let failed = |e: io::Error| {
            Failure::new(Exit::RunFailed, format!("--prometheus {port}: {e}"))
                .help("choose another port; 0 takes one that is free")
        };
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(failed)?;
        let at = listener.local_addr().map_err(failed)?;
        crate::say(format_args!("metrics are at http://{at}/metrics"));
        let newest: Arc<Mutex<Newest>> = Arc::default();
        let (shared, head) = (Arc::clone(&newest), Arc::new(head(run)));
        let at_once = Arc::new(AtomicUsize::new(0));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (shared, head) = (Arc::clone(&shared), Arc::clone(&head));
                // Who is one too many is not answered, and may ask again.
                let one = One::of(&at_once);
                if one.0.load(Ordering::Relaxed) > MOST {
                    continue;
                }
                // One who asks badly, or leaves, is nobody's loss.
                let _ = std::thread::Builder::new().spawn(move || {
                    let _one = one;
                    let page = || (*head).clone() + &page(&lock(&shared));
                    let _ = answer(stream, page);
                });
            }
        });
        Ok(Endpoint(newest))
    }

    /// Takes a step.
    pub fn step(&self, row: &Row) {
        lock(&self.0).row = Some(row.clone());
    }

    /// Takes a validation loss.
    pub fn validation(&self, loss: f64) {
        lock(&self.0).validation = Some(loss);
    }
}

/// One of those who are answered now, counted.
struct One(Arc<AtomicUsize>);

impl One {
    fn of(all: &Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        One(Arc::clone(all))
    }
}

impl Drop for One {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock(of: &Mutex<Newest>) -> std::sync::MutexGuard<'_, Newest> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads a request and answers it.
fn answer(mut stream: TcpStream, page: impl Fn() -> String) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let until = Instant::now() + PATIENCE;
    let mut request = Vec::new();
    while !request.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > LONGEST {
            return Ok(());
        }
        stream.set_read_timeout(Some(left))?;
        let mut some = [0; 512];
        match stream.read(&mut some)? {
            0 => return Ok(()),
            n => request.extend_from_slice(&some[..n]),
        }
    }
    let line = request.split(|&b| b == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    let (status, body) = match (words.next(), words.next()) {
        (Some("GET"), Some("/metrics")) => ("200 OK", page()),
        (Some("GET"), _) => ("404 Not Found", "metrics are at /metrics\n".into()),
        _ => ("405 Method Not Allowed", "only GET is answered\n".into()),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// The part of the page that does not change in a run.
fn head(run: &Described<'_>) -> String {
    let escaped = |text: &str| {
        let text = text.replace('\\', "\\\\").replace('"', "\\\"");
        text.replace('\n', "\\n")
    };
    format!(
        "# HELP meshwright_run The run that is watched.\n# TYPE meshwright_run gauge\nmeshwright_run{{model=\"{}\",plan=\"{}\"}} 1\n",
        escaped(run.name),
        escaped(run.plan)
    )
}

/// The figures of the newest step.
fn page(newest: &Newest) -> String {
    let mut page = String::new();
    let mut add = |name: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            page += &format!(
                "# HELP meshwright_{name} {help}\n# TYPE meshwright_{name} gauge\nmeshwright_{name} {value}\n"
            );
        }
    };
    if let Some(row) = &newest.row {
        add(
            "step",
            "The newest step, counted from 0.",
            Some(row.step as f64),
        );
        for (name, help, value) in row.figures() {
            add(name, help, value);
        }
    }
    let help = "Mean loss of the newest validation.";
    add("validation_loss", help, newest.validation);
    page
}
