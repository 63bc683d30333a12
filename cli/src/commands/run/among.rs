//! A run of several processes: which of them this one is, and how they come together.

use super::children::Children;
use super::elastic;
use super::fabric::Chosen;
use super::launcher::{self, Launched};
use super::orphan::Orphan;
use super::rendezvous::{self, Appointment};
use crate::args::RunArgs;
use crate::failure::{Exit, Failure};
use crate::interrupt::{BEFORE_IT_WENT_ON, Interrupts};
use crate::plan_file::Loaded;
use runtime::files::open_regular;
use runtime::processes::{Fingerprint, Host, JoinError, Place, Processes, Token, Way, join};
use runtime::record::{Finder, SILENT};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, ErrorKind, Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long processes have to come together, however short `--time-out` is: that is chosen for
/// steps, and a process that starts reads, lowers and checks the plan first. On a busy machine this
/// took more than the two seconds that a soak of kills gave it.
pub const LEAST_TO_JOIN: Duration = Duration::from_secs(20);

/// Which processes have the ranks of a run.
#[derive(Debug)]
pub enum Setting {
    /// This one.
    Alone,
    /// This one and others that it starts; `None`: as many as there are ranks.
    Starts(Option<usize>),
    /// One that was started so.
    Started(Place),
    /// Those that a launcher started.
    Launched(Launched),
    /// Those that an MPI library connects.
    #[cfg(feature = "mpi")]
    Mpi(runtime::processes::Mpi),
}

#[cfg(feature = "mpi")]
fn mpi() -> Result<Setting, Failure> {
    let mpi = runtime::processes::Mpi::start()?;
    // Each of them would train by itself, into the same files.
    if mpi.place().of == 1
        && let Some(launched) = beside_mpi()
    {
        let (of, by) = (launched.place.of, launched.by);
        let what = format!(
            "--mpi: the MPI library knows this process alone, and it is one of {of} by the variables of {by}"
        );
        let help = "start the processes with the mpirun of the library that this binary was built with (or with srun --mpi=pmix), or leave --mpi out, by which they talk over TCP";
        return Err(Failure::new(Exit::Usage, what).help(help));
    }
    if mpi.place().of == 1 {
        crate::say(format_args!(
            "note: --mpi: the MPI library knows this process alone, so all ranks are threads of it; mpirun starts several"
        ));
    }
    Ok(Setting::Mpi(mpi))
}

#[cfg(not(feature = "mpi"))]
fn mpi() -> Result<Setting, Failure> {
    Err(Failure::new(Exit::Usage, "--mpi: this build knows no MPI").help(
        "build it with `cargo build --release --features cli/mpi`, which needs an MPI library (libopenmpi-dev); without --mpi, processes that mpirun starts talk over TCP",
    ))
}

/// Finds out, from flags and the environment.
pub fn setting(args: &RunArgs) -> Result<Setting, Failure> {
    if let Some(place) = args.as_process {
        return Ok(Setting::Started(place));
    }
    let env = |name: &str| std::env::var(name).ok();
    if let Some(n) = args.processes {
        // Each task would train by itself, into the same files.
        if n != 1
            && let Ok(Some(launched)) = launcher::launched(&env)
        {
            let (of, by) = (launched.place.of, launched.by);
            let what = format!(
                "--processes starts processes of its own, and this is one of {of} that {by} started"
            );
            let help = format!(
                "leave --processes out: the {of} processes share the ranks; or have {by} start one"
            );
            return Err(Failure::new(Exit::Usage, what).help(help));
        }
        return Ok(match n {
            1 => Setting::Alone,
            0 => Setting::Starts(None),
            n => Setting::Starts(Some(n)),
        });
    }
    if args.alone {
        return Ok(Setting::Alone);
    }
    if args.mpi {
        return mpi();
    }
    let Some(launched) = launcher::launched(&env)? else {
        // A launcher that has one host left gives the flags that it gave for several.
        if launcher::is_there(&env) {
            return Ok(Setting::Alone);
        }
        let flags = [
            ("bind", args.bind.is_some()),
            ("rendezvous", args.rendezvous.is_some()),
            ("token-file", args.token_file.is_some()),
        ];
        return match flags.into_iter().find(|f| f.1) {
            None => Ok(Setting::Alone),
            Some((flag, _)) => Err(Failure::new(
                Exit::Usage,
                format!("--{flag} is for runs of several hosts, and no launcher started this one"),
            )
            .help("start it with torchrun, srun or mpirun, or leave the flag out")),
        };
    };
    if args.rendezvous.is_none() {
        launcher::check_address(&env)?;
    }
    Ok(Setting::Launched(
        launched.named(args.rendezvous.as_deref()),
    ))
}

impl Setting {
    /// This process' number.
    pub fn index(&self) -> usize {
        match self {
            Setting::Alone | Setting::Starts(_) => 0,
            Setting::Started(place) => place.index,
            Setting::Launched(launched) => launched.place.index,
            #[cfg(feature = "mpi")]
            Setting::Mpi(mpi) => mpi.place().index,
        }
    }
    /// Which one of those on its host this process is, where its launcher says so.
    fn local(&self) -> Option<usize> {
        match self {
            Setting::Alone | Setting::Starts(_) | Setting::Started(_) => None,
            Setting::Launched(launched) => launched.local,
            #[cfg(feature = "mpi")]
            Setting::Mpi(_) => beside_mpi()?.local,
        }
    }
    /// Whether the launcher asks all processes to end when one of them has died: then that is no
    /// interrupt of anybody's.
    pub fn end_with_one(&self) -> bool {
        match self {
            Setting::Alone | Setting::Starts(_) | Setting::Started(_) | Setting::Launched(_) => {
                false
            }
            #[cfg(feature = "mpi")]
            Setting::Mpi(_) => true,
        }
    }
    /// How many processes there are, and how many of them on this host, for a plan of so many
    /// ranks.
    pub fn counts(&self, n_ranks: usize) -> (usize, usize) {
        match self {
            Setting::Alone => (1, 1),
            Setting::Starts(n) => (n.unwrap_or(n_ranks), n.unwrap_or(n_ranks)),
            Setting::Started(place) => (place.of, place.of),
            #[cfg(feature = "mpi")]
            Setting::Mpi(mpi) => {
                let of = mpi.place().of;
                let here = beside_mpi().and_then(|l| l.on_this_host);
                (of, here.unwrap_or(of))
            }
            Setting::Launched(l) => {
                let of = l.place.of;
                let here = if l.is_local() { of } else { 1 };
                (of, l.on_this_host.unwrap_or(here))
            }
        }
    }
}

#[cfg(feature = "mpi")]
fn beside_mpi() -> Option<Launched> {
    launcher::launched(&|name| std::env::var(name).ok()).ok()?
}

/// The processes of a run. Those that this one started end with it.
pub struct Company {
    /// Those that it started; when a run fails they end before anything waits for them.
    pub children: Option<Children>,
    /// This one among them.
    pub processes: Arc<Processes>,
}

/// How long the end of another process may take to be heard.
const NEWS: Duration = Duration::from_secs(1);

impl Company {
    /// Whether a process is cut off from this one, and this one not from all others: no end of its
    /// own is heard, and another one is still heard.
    pub fn has_cut_off(&self, who: &Finder) -> bool {
        let until = Instant::now() + NEWS;
        while Instant::now() < until {
            if self.processes.has_heard_end(who.pid, &who.host) {
                return false;
            }
            std::thread::sleep(NEWS / 50);
        }
        self.processes.hears_another(who.pid, &who.host)
    }
    /// The processes that are lost by now, where one is: how they ended, or that a signal has stopped
    /// them.
    pub fn gone(&self) -> BTreeMap<usize, String> {
        let mut gone = match &self.children {
            Some(children) => children.killed_so_far(),
            None => self.processes.missed(),
        };
        for (process, _) in self.processes.stopped_here() {
            gone.entry(process).or_insert_with(|| SILENT.into());
        }
        gone
    }
    /// Ends it after a failure. Returns the processes that were killed or had hung, where this one
    /// started them, and how many there were.
    pub fn lost(self) -> (BTreeSet<usize>, usize) {
        let Company {
            children,
            processes,
        } = self;
        let of = processes.place().of;
        let stopped = processes.stopped_here().into_iter().map(|(p, _)| p);
        let mut lost: BTreeSet<usize> = stopped.collect();
        drop(processes);
        match children {
            Some(children) => {
                lost.extend(children.given_up());
                lost.extend(children.killed());
                (lost, of)
            }
            None => (BTreeSet::new(), of),
        }
    }
    /// Waits for the processes that were started, when the run is done. Says which did not end
    /// well.
    pub fn end(self) -> Vec<String> {
        let Company {
            children,
            processes,
        } = self;
        drop(processes);
        children.map_or_else(Vec::new, |c| c.finish())
    }
}

/// Brings the processes of a run together; nothing where there is but this one. An interrupt ends
/// that, with all that this process has started and posted.
pub fn gather(
    (setting, interrupts): (&Setting, &Interrupts),
    args: &RunArgs,
    (loaded, chosen): (&Loaded, &Chosen),
) -> Result<Option<Company>, Failure> {
    let n_ranks: u32 = loaded
        .program
        .roles
        .iter()
        .map(|r| r.mesh.n_devices())
        .sum();
    let (of, _) = setting.counts(n_ranks as usize);
    if of > n_ranks as usize {
        return Err(Failure::new(
            Exit::Usage,
            format!(
                "{of} processes for the plan's {}: each process must have a rank",
                ir::counted(n_ranks, "rank")
            ),
        )
        .help("start fewer processes, or compile for more devices"));
    }
    if of == 1 {
        return Ok(None);
    }
    let fingerprint = fingerprint(args, loaded, chosen);
    let patience = Duration::from_secs(args.time_out).max(LEAST_TO_JOIN);
    let is_asked = || interrupts.is_asked().then(|| early(args).to_string());
    let interrupted = || Failure::new(Exit::Interrupted, early(args));
    let alone = |processes: Processes| Company {
        processes: Arc::new(processes.with_local(setting.local())),
        children: None,
    };
    let with_launched = |host: Host, failed: &dyn Fn(JoinError) -> Failure| match host.gather(
        of,
        &fingerprint,
        patience,
        &mut || is_asked(),
    ) {
        Err(JoinError::Ended(_)) if interrupts.is_asked() => Err(interrupted()),
        gathered => Ok(Some(alone(gathered.map_err(failed)?))),
    };
    match setting {
        Setting::Alone => Ok(None),
        Setting::Starts(_) => {
            interrupts.begin_to_look();
            let host = open(loopback())?;
            let children = Children::start(of, &Appointment::new(host.address(), host.token()))?;
            let watch = &mut || is_asked().or_else(|| children.ended());
            let processes = match host.gather(of, &fingerprint, patience, watch) {
                // Whoever asks one of them to end asks the run.
                Err(JoinError::Ended(_))
                    if interrupts.is_asked() || children.were_interrupted() =>
                {
                    // They have nothing to lose either.
                    children.put_all_down();
                    return Err(interrupted());
                }
                Err(JoinError::Ended(what)) if args.kept.is_some() => {
                    // Others that were killed with it end within a moment.
                    std::thread::sleep(NEWS / 5);
                    let lost = children.killed_so_far().len().max(1);
                    children.put_all_down();
                    drop(children);
                    if interrupts.is_asked() {
                        return Err(interrupted());
                    }
                    return Err(elastic::begin_again(args, &what, lost));
                }
                gathered => gathered?,
            };
            let processes = Arc::new(processes);
            processes.are_watched();
            children.report_to(&processes, interrupts);
            Ok(Some(Company {
                processes,
                children: Some(children),
            }))
        }
        Setting::Started(place) => {
            let mut line = String::new();
            let read = std::io::stdin().lock().read_line(&mut line);
            let appointment = read.map_err(|e| e.to_string()).and_then(|_| {
                serde_json::from_str::<Appointment>(&line).map_err(|e| e.to_string())
            });
            let appointment = appointment.map_err(|e| {
                let what = format!("--as-process is for processes that a run starts itself: {e}");
                Failure::new(Exit::Usage, what).help("give --processes to start a run of several")
            })?;
            let find = &mut || Ok((appointment.address.clone(), appointment.token()?));
            let way = Way::LookedUp(find);
            let _orphan = Orphan::watch(appointment.pid);
            Ok(Some(alone(join(*place, &fingerprint, patience, way)?)))
        }
        #[cfg(feature = "mpi")]
        Setting::Mpi(mpi) => {
            let last_words = super::last_resort::words(args, loaded, mpi.place());
            let joined = mpi.join(&fingerprint, patience, Some(last_words));
            Ok(Some(alone(joined?)))
        }
        Setting::Launched(launched) if launched.is_local() => {
            let place = launched.place;
            let failed = |e: JoinError| {
                let is_missed =
                    matches!(e, JoinError::Unreachable { .. } | JoinError::Missing { .. });
                let way = launched.way_together().filter(|_| is_missed);
                let failure = Failure::from(e);
                match way {
                    Some(way) => failure.help(way),
                    None => failure,
                }
            };
            if place.index > 0 {
                let find = &mut || {
                    let found = rendezvous::read(&launched.key)?;
                    Ok((found.address.clone(), found.token()?))
                };
                let way = Way::LookedUp(find);
                let joined = join(place, &fingerprint, patience, way);
                return Ok(Some(alone(joined.map_err(failed)?)));
            }
            interrupts.begin_to_look();
            if args.token_file.is_some() || args.rendezvous.is_some() || args.bind.is_some() {
                crate::say(format_args!(
                    "note: all processes are on this host, where they find each other by a secret of their own: --token-file, --rendezvous and --bind are not used"
                ));
            }
            let host = open(loopback())?;
            let appointment = Appointment::new(host.address(), host.token());
            let _posted = rendezvous::post(&launched.key, &appointment)?;
            with_launched(host, &failed)
        }
        Setting::Launched(launched) => {
            let (address, port, token) = abroad(args, launched)?;
            let place = launched.place;
            if place.index > 0 {
                let way = Way::Known(address, token);
                return Ok(Some(alone(join(place, &fingerprint, patience, way)?)));
            }
            interrupts.begin_to_look();
            let host = Host::open(bound(args, (&address, port))?, token)?;
            with_launched(host, &Failure::from)
        }
    }
}

/// The words for an interrupt before all have met.
fn early(args: &RunArgs) -> &'static str {
    match args.continued {
        Some(_) => BEFORE_IT_WENT_ON,
        None => "interrupted before all processes had met; nothing was written",
    }
}

fn loopback() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 0).into()
}

fn open(at: SocketAddr) -> Result<Host, Failure> {
    let token = Token::random().map_err(|e| Failure::new(Exit::RunFailed, e))?;
    Ok(Host::open(at, token)?)
}

/// Where process 0 of a run of several hosts can be reached, its port, and the token.
fn abroad(args: &RunArgs, launched: &Launched) -> Result<(String, u16, Token), Failure> {
    let missing = |what: &str, help: &str| {
        let what = format!("{}: {what}", launched.why_abroad());
        let help = match launched.way_home() {
            Some(home) => format!("{home}; if not, {help}"),
            None => help.to_string(),
        };
        Failure::new(Exit::Usage, what).help(help)
    };
    let Some(path) = &args.token_file else {
        return Err(missing(
            "a run of several hosts needs --token-file, the secret by which its processes know each other",
            "make a token with `(umask 077; openssl rand -hex 32 > token)` and give every process a copy",
        ));
    };
    let token = rendezvous::token(path)?;
    let address = args.rendezvous.clone().or_else(|| launched.address.clone());
    let Some(address) = address else {
        return Err(missing(
            "a run of several hosts needs --rendezvous HOST:PORT, where process 0 can be reached",
            "give the host and any free port of process 0; under Slurm the host is the first line of `scontrol show hostnames`",
        ));
    };
    let port = address
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok());
    match port {
        Some(port @ 1u16..) => Ok((address, port, token)),
        _ => {
            let what = format!("the rendezvous `{address}` has no port from 1 to 65535");
            let help = "give it as HOST:PORT, for example node7:29400";
            Err(Failure::new(Exit::Usage, what).help(help))
        }
    }
}

/// Where process 0 listens: at the address that was asked for, never at all there are.
fn bound(args: &RunArgs, (address, port): (&str, u16)) -> Result<SocketAddr, Failure> {
    let usage = |what: String, help: &str| Failure::new(Exit::Usage, what).help(help);
    let Some(bind) = args.bind else {
        let found = address.to_socket_addrs().ok().and_then(|mut a| a.next());
        let example = found.map_or("10.0.0.1".into(), |a| a.ip().to_string());
        return Err(usage(
            format!("process 0 may not listen for other hosts, at {address}, unasked"),
            &format!(
                "give --bind with this host's address in the network of the run, as --bind {example}: it is not encrypted, so the network must be trusted"
            ),
        ));
    };
    if bind.is_unspecified() {
        return Err(usage(
            format!("--bind {bind} would listen in all networks of this host"),
            "give the host's address in the network of the run",
        ));
    }
    Ok(SocketAddr::new(bind, port))
}

fn known(what: std::io::Result<String>) -> String {
    what.unwrap_or_else(|_| "unknown".into())
}

/// The length of a file, and a hash of its beginning and its end.
pub fn ends_of(path: &Path) -> std::io::Result<String> {
    const END: u64 = 1 << 20;
    let mut file = open_regular(path)?;
    let len = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    for start in [0, len.saturating_sub(END)] {
        file.seek(SeekFrom::Start(start))?;
        std::io::copy(&mut (&file).take(END), &mut hasher)?;
    }
    let hash = hasher.finalize().to_hex();
    Ok(format!("of {len} bytes, {}", &hash[..16]))
}

/// Everything that must be the same in all processes.
fn fingerprint(args: &RunArgs, loaded: &Loaded, chosen: &Chosen) -> Fingerprint {
    let binary = std::env::current_exe().and_then(std::fs::read);
    let binary = binary.map(|b| blake3::hash(&b).to_hex()[..16].to_string());
    let data = ends_of(&args.data);
    let tokenizer = args.tokenizer.as_ref().map(|path| {
        let mut text = Vec::new();
        let read = open_regular(path).and_then(|mut file| file.read_to_end(&mut text));
        known(read.map(|_| blake3::hash(&text).to_hex()[..16].to_string()))
    });
    let all = [
        ("the plan", loaded.hash.clone()),
        ("the version", env!("CARGO_PKG_VERSION").into()),
        ("the binary", known(binary)),
        ("the data", known(data)),
        ("the tokenizer", tokenizer.unwrap_or_else(|| "none".into())),
        (
            "--validation-fraction",
            args.validation_fraction.to_string(),
        ),
        ("--validate-every", format!("{:?}", args.validate_every)),
        ("--backend", format!("{:?}", args.backend)),
        // Each process chooses by the GPUs and the library that its host has.
        (
            "--fabric",
            chosen.by.clone().unwrap_or_else(|| "cpu".into()),
        ),
    ];
    Fingerprint(all.map(|(name, value)| (name.to_string(), value)).into())
}

impl From<JoinError> for Failure {
    fn from(e: JoinError) -> Self {
        use JoinError::*;
        let help = match &e {
            Listen { source, .. } if source.kind() == ErrorKind::AddrNotAvailable => {
                "give --bind an address of the host of process 0; `ip address` lists them"
            }
            Listen { .. } => "choose another port, or end what listens there",
            Unreachable { .. } => {
                "see the messages of process 0, and that no two processes have one number (RANK); slow hosts have longer with --time-out SECONDS"
            }
            Missing { .. } => {
                "see the messages of the processes that are missing; slow hosts have longer with --time-out SECONDS"
            }
            Token { .. } => "give every process the same --token-file",
            Differs { .. } => {
                "start the same binary with the same plan and data on every host, and where hosts have other GPUs or another NCCL, with --fabric host"
            }
            Refused { .. } => "the message of process 0 says more",
            Ended(_) => "its own message, where it wrote one, is above",
            Apart { .. } => {
                "every host must be able to reach every other one in the network of the run"
            }
        };
        Failure::new(Exit::RunFailed, &e).help(help)
    }
}
