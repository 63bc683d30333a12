//! Which process of how many this one is, by the variables that launchers set.

use super::{among, children, orphan};
use crate::failure::{Exit, Failure};
use runtime::processes::Place;
use std::collections::BTreeMap;
use std::time::Duration;

/// The facts that a launcher states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The launcher's name, for messages.
    pub by: &'static str,
    /// Which process this is, of how many.
    pub place: Place,
    /// How many of them are on this host, where that is said.
    pub on_this_host: Option<usize>,
    /// Which one of those on this host this is, where that is said.
    pub local: Option<usize>,
    /// Host and port at which process 0 can be reached, where that is said.
    pub address: Option<String>,
    /// The name that tells this run from others of this host.
    pub key: String,
    /// Whether its variables may have been set by hand.
    is_by_hand: bool,
    /// Whether nothing but the parent of its processes tells it from others.
    is_of_parent: bool,
}

impl Launched {
    /// Why this run is taken for one of several hosts, in words.
    pub fn why_abroad(&self) -> String {
        let all = ir::counted(self.place.of as u64, "process");
        let who = match self.is_by_hand {
            true => format!("RANK and WORLD_SIZE are of a run of {all}"),
            false => format!("{} started {all}", self.by),
        };
        match (self.on_this_host, &self.address) {
            (Some(here), _) => format!("{who}, {here} of them on this host"),
            (None, Some(address)) => format!("{who}, the first at {address}"),
            (None, None) => format!("{who}, and nothing says that all are on this host"),
        }
    }
    /// The same, named by the address where processes on several hosts meet if nothing but their
    /// parent names their run: each host has another parent.
    pub fn named(mut self, rendezvous: Option<&str>) -> Self {
        if let Some(address) = rendezvous.filter(|_| self.is_of_parent && !self.is_local()) {
            self.key = format!("{} {address}", self.by);
        }
        self
    }
    /// How processes of this host find each other that did not, where nothing but their parent tells
    /// their run from others.
    pub fn way_together(&self) -> Option<&'static str> {
        (self.is_of_parent && self.is_by_hand).then_some(
            "processes that find each other by RANK, WORLD_SIZE and LOCAL_WORLD_SIZE alone must have one parent, as a shell that starts all of them; others are told of each other by MASTER_ADDR=127.0.0.1 and a MASTER_PORT that no other run has",
        )
    }
    /// How somebody who set the variables by hand says that all are on this host.
    pub fn way_home(&self) -> Option<&'static str> {
        (self.is_by_hand && self.on_this_host.is_none()).then_some(
            "if all are on this host, set MASTER_ADDR=127.0.0.1, and MASTER_PORT to a port that no other run has",
        )
    }
    /// Whether all processes are known to be on this host.
    pub fn is_local(&self) -> bool {
        let all = self.place.of;
        match (self.on_this_host, &self.address) {
            (Some(here), _) => here == all,
            (None, Some(address)) => {
                let host = address.rsplit_once(':').map_or("", |(host, _)| host);
                ["localhost", "127.0.0.1", "[::1]"].contains(&host)
            }
            (None, None) => false,
        }
    }
}

/// The variables of a launcher: its name, those of a process' number and of how many there are,
/// of how many are on the host and which one of them it is, and those that together name the run.
struct Variables {
    by: &'static str,
    index: &'static str,
    of: &'static [&'static str],
    on_this_host: &'static [&'static str],
    local: &'static str,
    key: &'static [&'static str],
    /// Set only inside of a run of the launcher.
    needs: Option<&'static str>,
}

/// The first that is there counts: torchrun may itself run under Slurm.
const LAUNCHERS: [Variables; 4] = [
    Variables {
        by: "torchrun",
        index: "RANK",
        of: &["WORLD_SIZE"],
        on_this_host: &["LOCAL_WORLD_SIZE"],
        local: "LOCAL_RANK",
        key: &[
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        ],
        needs: None,
    },
    Variables {
        by: "mpirun",
        index: "OMPI_COMM_WORLD_RANK",
        of: &["OMPI_COMM_WORLD_SIZE"],
        on_this_host: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        key: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
        needs: None,
    },
    Variables {
        by: "mpirun",
        index: "PMI_RANK",
        of: &["PMI_SIZE"],
        on_this_host: &["MPI_LOCALNRANKS"],
        local: "MPI_LOCALRANKID",
        key: &["PMI_JOBID", "HYDRA_JOBID"],
        needs: None,
    },
    Variables {
        by: "srun",
        index: "SLURM_PROCID",
        of: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        on_this_host: &[],
        local: "SLURM_LOCALID",
        key: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        // A batch script has the others, too, but is not a process of a step.
        needs: Some("SLURM_STEP_ID"),
    },
];

/// The launcher whose variables are set. With `--mpi=pmi2` srun sets those of an MPI library's as well,
/// with the same numbers as its own, which say more.
fn launcher(env: &dyn Fn(&str) -> Option<String>) -> Option<&'static Variables> {
    let is_set = |name: &&str| env(name).is_some_and(|v| !v.is_empty());
    let of_launcher = |v: &&Variables| is_set(&v.index) && v.needs.iter().all(is_set);
    let found = LAUNCHERS.iter().find(of_launcher)?;
    let srun = LAUNCHERS.iter().find(|v| v.by == "srun");
    let is_its = |v: &&Variables| {
        let same = [(found.index, v.index), (found.of[0], v.of[0])];
        found.index == "PMI_RANK" && of_launcher(v) && same.iter().all(|(a, b)| env(a) == env(b))
    };
    Some(srun.filter(is_its).unwrap_or(found))
}

/// Whether a launcher started this process, be it the only one.
pub fn is_there(env: &dyn Fn(&str) -> Option<String>) -> bool {
    launcher(env).is_some()
}

/// The name of the variable that a launcher sets in the processes that it starts, and nobody before it;
/// none without a launcher, or where somebody may have set its variables by hand. Torchrun sets its
/// run's name beside RANK, which others set, too; other launchers are not imitated.
pub fn mark(env: &dyn Fn(&str) -> Option<String>) -> Option<&'static str> {
    let found = launcher(env)?;
    let mark = match found.by {
        "torchrun" => "TORCHELASTIC_RUN_ID",
        _ => found.index,
    };
    env(mark).map(|_| mark)
}

/// Reads what the environment says; nothing without a launcher, or where it started one process.
///
/// Fails when a variable is not what its launcher would set, or the one is missing that tells the
/// processes of a run apart.
pub fn launched(env: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launched>, Failure> {
    let is_set = |name: &&str| env(name).is_some_and(|v| !v.is_empty());
    let Some(variables) = launcher(env) else {
        return match env("WORLD_SIZE") {
            // Each of them would train by itself, into the same files.
            Some(n) if n.trim().parse().is_ok_and(|n: usize| n > 1) => {
                let what = format!("WORLD_SIZE is {n}, and RANK is not set");
                Err(Failure::new(Exit::Usage, what).help(
                    "set RANK to the number of each process, from 0, as torchrun does, or give --alone for a run that no launcher started",
                ))
            }
            _ => Ok(None),
        };
    };
    let wrong = |name: &str, problem: String| {
        let what = format!(
            "{} is set as {} sets it, and {problem}",
            variables.index, variables.by
        );
        Failure::new(Exit::Usage, what).help(format!(
            "set {name} to a whole number, or give --alone for a run that no launcher started"
        ))
    };
    let number = |name: &str| -> Result<usize, Failure> {
        let text = env(name).unwrap_or_default();
        text.trim()
            .parse()
            .map_err(|_| wrong(name, format!("{name} is `{text}`, no number")))
    };
    let Some(of) = variables.of.iter().find(|n| is_set(n)) else {
        let name = variables.of[0];
        return Err(wrong(name, format!("{name} is not")));
    };
    let place = Place {
        index: number(variables.index)?,
        of: number(of)?,
    };
    if place.index >= place.of {
        let (Place { index, of: n }, name) = (place, variables.index);
        let help = format!(
            "number the {n} processes from 0 in {name}, or give --alone for a run that no launcher started"
        );
        return Err(wrong(of, format!("{name} is {index} of {n}")).help(help));
    }
    let mut on_this_host = None;
    if let Some(name) = variables.on_this_host.iter().find(|n| is_set(n)) {
        on_this_host = Some(number(name)?);
    }
    if variables.by == "srun" {
        let nodes = ["SLURM_STEP_NUM_NODES", "SLURM_NNODES"];
        let nodes = nodes.iter().find_map(|n| env(n));
        on_this_host = match nodes.as_deref() {
            Some("1") => Some(place.of),
            _ => tasks_of_node(env),
        };
    }
    // A hint: what is no place among those of its host, as the -1 of scripts, says nothing.
    let local = Some(variables.local).filter(is_set);
    let local = local.and_then(|name| number(name).ok());
    let local = local.filter(|local| *local < on_this_host.unwrap_or(place.of));
    let mut key: Vec<String> = vec![variables.by.into()];
    key.extend(variables.key.iter().filter_map(|n| env(n)));
    let is_of_parent = key.len() == 1;
    if is_of_parent {
        // The launcher names no run: its processes have one parent.
        key.push(format!("parent {}", std::os::unix::process::parent_id()));
    }
    Ok((place.of > 1).then(|| Launched {
        by: variables.by,
        place,
        on_this_host,
        local,
        address: address(env),
        key: key.join(" "),
        is_by_hand: mark(env).is_none(),
        is_of_parent,
    }))
}

/// Kills the processes of this process' launch that are on this host and that a signal has stopped: before
/// all have met nobody else would, and they cannot end by themselves. They have the same arguments and
/// were started within the time in which all have to be, in seconds; where another one has this process'
/// number as well, two runs were started with the same variables, and nobody is killed.
pub fn put_down_stopped(time_out: u64) {
    let own = |name: &str| std::env::var(name).ok();
    let me = std::process::id();
    let (Ok(Some(run)), Some(begun)) = (launched(&own), orphan::started(me)) else {
        return;
    };
    let parent = std::os::unix::process::parent_id();
    let apart = Duration::from_secs(time_out).max(among::LEAST_TO_JOIN);
    let place = |pid: u32| std::fs::read_link(format!("/proc/{pid}/cwd")).ok();
    // A process 0 that goes on with a run has other arguments than it was given.
    let command = |pid: u32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let goes_on = |word: &[u8]| word.starts_with(b"--continued");
        let is_given = !words.split(|byte| *byte == 0).any(goes_on);
        is_given.then_some(words)
    };
    let (my_place, my_command) = (place(me), command(me));
    let is_same = |pid: u32| match (command(pid), &my_command) {
        (Some(its), Some(mine)) => its == *mine,
        _ => true,
    };
    let sibling = |pid: u32| {
        let variables = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variables: BTreeMap<&[u8], &[u8]> = variables
            .split(|byte| *byte == 0)
            .filter_map(|v| Some((v.split(|b| *b == b'=').next()?, v)))
            .collect();
        let of = |name: &str| {
            let variable = variables.get(name.as_bytes())?;
            let value = variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
            Some(String::from_utf8_lossy(value).into_owned())
        };
        let found = launched(&of).ok()??;
        let is_of_run = found.key == run.key
            && found.place.of == run.place.of
            && (!run.is_of_parent || orphan::parent_of(pid) == Some(parent))
            && orphan::started(pid)?.abs_diff(begun) <= apart
            && place(pid) == my_place
            && is_same(pid);
        is_of_run.then_some((pid, found.place.index))
    };
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let siblings: Vec<(u32, usize)> = all.filter(|pid| *pid != me).filter_map(sibling).collect();
    if siblings.iter().any(|(_, index)| *index == run.place.index) {
        return;
    }
    for (pid, index) in siblings {
        if children::put_down_of_others(pid) {
            crate::say(format_args!(
                "note: a signal has stopped process {index} of the run (pid {pid}) before all had met: it is killed, as it cannot end by itself"
            ));
        }
    }
}

/// How many tasks of a step of Slurm's are on the node of this one: `2(x3),1` are two on each of
/// three nodes, and one on a fourth.
fn tasks_of_node(env: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    let names = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let all = names.iter().find_map(|n| env(n))?;
    let mut node: usize = env("SLURM_NODEID")?.trim().parse().ok()?;
    for some in all.split(',') {
        let (tasks, nodes) = match some.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (some, 1),
        };
        if node < nodes {
            return tasks.trim().parse().ok();
        }
        node -= nodes;
    }
    None
}

/// Where process 0 is by MASTER_ADDR and MASTER_PORT. At the port itself torchrun's agent listens
/// where it says so; the next one is taken then.
fn address(env: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let host = env("MASTER_ADDR").filter(|h| !h.is_empty())?;
    let port: u16 = env("MASTER_PORT")?.trim().parse().ok()?;
    let port = Some(port).filter(|port| *port > 0)?;
    let is_taken = env("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v == "True");
    let port = port.checked_add(u16::from(is_taken))?;
    let host = match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]"),
        false => host,
    };
    Some(format!("{host}:{port}"))
}

/// Refuses an address by MASTER_ADDR and MASTER_PORT of which the port is none: process 0 would be
/// looked for elsewhere, without a word.
pub fn check_address(env: &dyn Fn(&str) -> Option<String>) -> Result<(), Failure> {
    let given = |name: &str| env(name).filter(|v| !v.is_empty());
    match (given("MASTER_ADDR"), given("MASTER_PORT")) {
        (Some(_), Some(port)) if address(env).is_none() => {
            let what = format!("MASTER_PORT is `{port}`, at which process 0 cannot listen");
            Err(Failure::new(Exit::Usage, what).help(
                "set MASTER_PORT to a port from 1 to 65534, or unset it, or give --rendezvous HOST:PORT",
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Option<Launched>, Failure> {
        launched(&|name| {
            let found = variables.iter().find(|v| v.0 == name);
            found.map(|v| v.1.to_string())
        })
    }

    #[test]
    fn torchrun_is_understood() {
        let variables = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("LOCAL_RANK", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            // Torchrun in a step of Slurm's.
            ("SLURM_PROCID", "0"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_ID", "0"),
        ];
        let launched = of(&variables).unwrap().unwrap();
        assert_eq!(launched.local, Some(3));
        assert_eq!(launched.by, "torchrun");
        assert_eq!(launched.place, Place { index: 3, of: 4 });
        assert!(launched.is_local());
        assert_eq!(launched.address.as_deref(), Some("127.0.0.1:29501"));
        assert_eq!(launched.key, "torchrun 127.0.0.1 29500");
        let spread = [variables[0], variables[1], ("LOCAL_WORLD_SIZE", "2")];
        let spread = of(&spread).unwrap().unwrap();
        assert!(!spread.is_local() && spread.local.is_none());
    }

    /// Slurm says how many there are node by node, here dealt out one by one.
    #[test]
    fn processes_are_told_apart_on_their_host() {
        let on = |node: &str, tasks: &str| {
            let step = [
                ("SLURM_PROCID", "4"),
                ("SLURM_LOCALID", "0"),
                ("SLURM_NODEID", node),
                ("SLURM_STEP_NUM_TASKS", "7"),
                ("SLURM_STEP_NUM_NODES", "4"),
                ("SLURM_STEP_TASKS_PER_NODE", tasks),
                ("SLURM_STEP_ID", "0"),
            ];
            let srun = of(&step).unwrap().unwrap();
            assert_eq!(srun.local, Some(0));
            srun.on_this_host
        };
        assert_eq!(on("0", "2(x3),1"), Some(2));
        assert_eq!(on("2", "2(x3),1"), Some(2));
        assert_eq!(on("3", "2(x3),1"), Some(1));
        assert_eq!(on("1", "1,4,2"), Some(4));
        for (node, tasks) in [
            ("4", "2(x3),1"),
            ("0", ""),
            ("0", "2(x"),
            ("0", "2(xa)"),
            ("x", "2"),
        ] {
            assert_eq!(on(node, tasks), None, "{node} of {tasks}");
        }
        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ];
        assert_eq!(of(&mpi).unwrap().unwrap().local, Some(1));
        let hydra = [
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("MPI_LOCALRANKID", "1"),
        ];
        assert_eq!(of(&hydra).unwrap().unwrap().local, Some(1));
    }

    #[test]
    fn mpirun_and_srun_are_understood() {
        let mpi = of(&[
            ("OMPI_COMM_WORLD_RANK", "0"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_NAMESPACE", "prterun-1"),
        ]);
        let mpi = mpi.unwrap().unwrap();
        assert_eq!((mpi.by, mpi.key.as_str()), ("mpirun", "mpirun prterun-1"));
        assert!(mpi.is_local() && mpi.address.is_none());
        let step = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_NNODES", "2"),
            ("SLURM_STEP_ID", "1"),
        ];
        let srun = of(&step).unwrap().unwrap();
        assert_eq!((srun.by, srun.is_local()), ("srun", false));
        // A step with the variables of PMI-2, which say nothing of hosts.
        let pmi = [
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_STEP_ID", "1"),
        ];
        let pmi2 = of(&pmi).unwrap().unwrap();
        assert_eq!((pmi2.by, pmi2.is_local()), ("srun", true));
        // An mpirun of its own within a step has other numbers.
        let within = [("PMI_RANK", "1"), ("PMI_SIZE", "8")];
        let within = of(&[&within[..], &pmi[2..]].concat()).unwrap().unwrap();
        assert_eq!((within.by, within.place.of), ("mpirun", 8));
        // The batch script itself is no process of a step.
        assert_eq!(of(&step[..4]).unwrap(), None);
    }

    #[test]
    fn one_process_and_none_are_alone() {
        assert_eq!(of(&[]).unwrap(), None);
        assert_eq!(of(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
        let by_hand = |name: &str| (name == "RANK").then(|| "0".into());
        assert!(is_there(&by_hand) && mark(&by_hand).is_none());
        let is_set = |name: &str| ["RANK", "TORCHELASTIC_RUN_ID"].contains(&name);
        let by_torchrun = |name: &str| is_set(name).then(|| "0".into());
        assert_eq!(mark(&by_torchrun), Some("TORCHELASTIC_RUN_ID"));
        assert!(!is_there(&|_| None));
    }

    #[test]
    fn what_no_launcher_would_set_is_named() {
        let wrong = |variables: &[(&str, &str)], words: &str| {
            let error = of(variables).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        wrong(&[("RANK", "0")], "WORLD_SIZE is not");
        wrong(&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is `x`");
        wrong(&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2 of 2");
        wrong(
            &[("WORLD_SIZE", "2")],
            "WORLD_SIZE is 2, and RANK is not set",
        );
        assert_eq!(of(&[("WORLD_SIZE", "1")]).unwrap(), None);
        for port in ["xyz", "65536", "-1"] {
            let set = [
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "node0"),
                ("MASTER_PORT", port),
            ];
            assert!(of(&set).unwrap().unwrap().address.is_none());
            let env = |name: &str| set.iter().find(|v| v.0 == name).map(|v| v.1.to_string());
            let error = check_address(&env).unwrap_err().to_string();
            assert!(
                error.contains(&format!("MASTER_PORT is `{port}`")),
                "{error}"
            );
        }
        wrong(&[("PMI_RANK", "0"), ("PMI_SIZE", "-1")], "PMI_SIZE is `-1`");
        // A place on the host is a hint.
        for local in ["?", "-1", "2", "18446744073709551615"] {
            let set = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", local)];
            assert_eq!(of(&set).unwrap().unwrap().local, None, "{local}");
        }
    }
}
