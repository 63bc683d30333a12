//! Scripts: which command starts the training, what it starts, and on how many devices.

use crate::arguments::{Arguments, gap_error, option};
use crate::shell::{self, Command, Script};
use crate::{Given, JobError, Open, Reading, deepspeed, error, megatron, torchtitan};
use serde::Serialize;

/// Hosts and devices, as far as a file states them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct World {
    /// Hosts.
    pub hosts: Option<u32>,
    /// Devices of each.
    pub per_host: Option<u32>,
    /// All devices, where they are stated as one number.
    pub devices: Option<u32>,
}

impl World {
    /// All devices, where they are known.
    pub fn devices(&self) -> Option<u32> {
        let product = self.hosts.zip(self.per_host);
        self.devices.or(product.and_then(|(a, b)| a.checked_mul(b)))
    }
}

/// A command that starts a training.
struct Start {
    line: usize,
    /// Words before the program.
    launcher: Vec<String>,
    /// The program: a script or a module.
    program: String,
    /// Its arguments.
    arguments: Vec<String>,
}

/// Reads a script.
pub(crate) fn read(
    file: &str,
    text: &str,
    given: &Given,
    open: Open<'_>,
) -> Result<Reading, JobError> {
    let script = shell::script(text, &given.variables);
    let script = script.map_err(|w| error(file, Some(w.line), w.problem, "correct the script"))?;
    let start = start(file, &script)?;
    let world = world(file, &script, &start)?;
    let is_slurm = !script.sbatch.is_empty();
    let form = |what: &str| match is_slurm {
        true => format!("a Slurm script that starts {what}"),
        false => format!("a script that starts {what}"),
    };
    let line_of = |name: &str| line_of(text, name, start.line);
    let args = Arguments::of_words(file, &start.arguments, &line_of, &script.gaps);
    // A word that is a whole variable may hold any arguments.
    if let Some(gap) = start
        .arguments
        .iter()
        .filter_map(|w| shell::whole_gap(w))
        .find(|g| args.is_open(g))
        && script.gaps.get(gap) == Some(&shell::Gap::Unset)
    {
        let what = "the command of the training";
        return Err(gap_error(
            file,
            Some(start.line),
            gap,
            script.gaps.get(gap),
            what,
        ));
    }
    let titan = ["job.config-file", "job.config_file", "module"];
    if start.program.contains("torchtitan")
        || args.has_any(&titan)
        || start.program.ends_with("run_train.sh")
    {
        let config = match args.text("job.config-file")? {
            Some(path) => path.to_string(),
            None => start.config(file)?,
        };
        let toml = opened(file, &config, open)?;
        let beside = torchtitan::Beside {
            world,
            overrides: Some(args),
        };
        let mut reading = torchtitan::read(&config, &toml, given, &beside)?;
        reading.files.push(config);
        reading.form = form("torchtitan");
        return Ok(reading);
    }
    let json = ["deepspeed-config", "deepspeed"];
    let mut config = None;
    for name in json {
        if args.has_any(&[name]) && config.is_none() {
            config = match name {
                "deepspeed" if args.switch_alone(name) => None,
                name => args.text(name)?.map(String::from),
            };
        }
    }
    let is_megatron = args.has_any(&[
        "num-layers",
        "tensor-model-parallel-size",
        "hidden-size",
        "num-attention-heads",
    ]) || start.program.contains("pretrain_");
    if is_megatron {
        let mut beside = megatron::Beside::default();
        let mut files = Vec::new();
        if let Some(path) = &config {
            let json = opened(file, path, open)?;
            beside.deepspeed = true;
            beside.zero = Some(deepspeed::zero_stage(path, &json)?);
            files.push(path.clone());
        } else {
            beside.deepspeed = args.switch("deepspeed");
        }
        let (job, notes) = megatron::job(&args, world, given, &beside)?;
        let what = match beside.deepspeed {
            true => "Megatron-DeepSpeed",
            false => "Megatron-LM",
        };
        return Ok(Reading {
            form: form(what),
            files,
            job,
            settings: args.settings(),
            notes,
            measured: None,
        });
    }
    if let Some(path) = config {
        let json = opened(file, &path, open)?;
        let beside = deepspeed::Beside {
            world,
            trainer: Some(args),
        };
        let mut reading = deepspeed::read(&path, &json, given, &beside)?;
        reading.files.push(path);
        reading.form = form("DeepSpeed");
        return Ok(reading);
    }
    Err(error(
        file,
        Some(start.line),
        format!(
            "`{}` is started here, and its arguments are neither Megatron-LM's (--num-layers), nor name a DeepSpeed file (--deepspeed_config) or one of torchtitan (--job.config_file)",
            shell::shown(&start.program)
        ),
        "give the file that says how it trains in place of this script",
    ))
}

impl Start {
    /// The file of torchtitan's `run_train.sh`, which takes it from its environment.
    fn config(&self, file: &str) -> Result<String, JobError> {
        let own = self
            .launcher
            .iter()
            .find_map(|w| w.strip_prefix("CONFIG_FILE="));
        own.map(String::from).ok_or_else(|| {
            error(
                file,
                Some(self.line),
                "torchtitan is started without --job.config_file",
                "name its TOML file there, or import that file itself",
            )
        })
    }
}

fn opened(file: &str, path: &str, open: Open<'_>) -> Result<String, JobError> {
    if let Some(gap) = shell::gap(path) {
        let what = "the name of the configuration";
        return Err(gap_error(file, None, gap, None, what));
    }
    open(path).map_err(|e| {
        error(
            file,
            None,
            format!("it names the file {path}, which cannot be read: {e}"),
            "name it by a path that is right from here, or from the script's folder, or import that file itself",
        )
    })
}

/// The first line at or after the command, else anywhere, that has an argument of this name.
fn line_of(text: &str, name: &str, start: usize) -> Option<usize> {
    let has = |line: &&str| {
        let mut words = line.split(|c: char| c.is_whitespace() || "=\"'()".contains(c));
        words.any(|w| w == name)
    };
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().skip(start.saturating_sub(1)).position(has);
    let at = at
        .map(|i| i + start)
        .or_else(|| lines.iter().position(has).map(|i| i + 1));
    at.or(Some(start))
}

/// The most commands in quotes that stand in each other.
const DEEPEST: usize = 8;

/// The one command that starts a training.
fn start(file: &str, script: &Script) -> Result<Start, JobError> {
    let mut found: Vec<Start> = Vec::new();
    for command in &script.commands {
        found.extend(start_of(command, &command.words, 0));
    }
    if found.is_empty() {
        // Arguments alone are an argument list.
        let is_list = |c: &&Command| c.words.first().is_some_and(|w| w.starts_with("--"));
        let list: Vec<&Command> = script.commands.iter().filter(is_list).collect();
        if let Some(first) = list.first() {
            return Ok(Start {
                line: first.line,
                launcher: Vec::new(),
                program: String::new(),
                arguments: list.iter().flat_map(|c| c.words.clone()).collect(),
            });
        }
    }
    if let [first, second, ..] = &found[..] {
        return Err(error(
            file,
            Some(second.line),
            format!(
                "two commands start a training: `{}` on line {} and `{}` on line {}",
                shell::shown(&first.program),
                first.line,
                shell::shown(&second.program),
                second.line
            ),
            "leave one of them in a copy of the file",
        ));
    }
    found.pop().ok_or_else(|| {
        let gap = script.commands.iter().flat_map(|c| c.words.first()).find_map(|w| shell::gap(w));
        match gap {
            Some(gap) => gap_error(file, None, gap, script.gaps.get(gap), "a command"),
            None => error(
                file,
                None,
                "no command of it starts a training: none runs a Python script or module, and none has arguments of Megatron-LM",
                "a job is a script with torchrun, srun, deepspeed or python and a training script, an argument list, a log of Megatron-LM, a DeepSpeed JSON or a torchtitan TOML",
            ),
        }
    })
}

/// Programs that start others, so that they are no training.
const LAUNCHERS: [&str; 6] = [
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "deepspeed.launcher.runner",
    "accelerate.commands.launch",
    "launch.py",
];

/// The training that a command starts; none where it starts no training.
fn start_of(command: &Command, words: &[String], depth: usize) -> Option<Start> {
    let first = words.iter().find(|w| !w.contains('='))?;
    let ignored = [
        "echo", "printf", "cat", "cp", "mkdir", "cd", "ls", "rm", "pip", "git", "source", ".",
        "module", "which",
    ];
    if ignored.contains(&first.as_str()) || depth > DEEPEST {
        return None;
    }
    for (i, word) in words.iter().enumerate() {
        let quoted = i > 0 && matches!(words[i - 1].as_str(), "-c" | "-lc" | "-xc");
        if quoted && word.contains(char::is_whitespace) {
            let inner = shlex::split(word)?;
            let mut start = start_of(command, &inner, depth + 1)?;
            let outer = words[..i].iter().cloned();
            start.launcher = outer.chain(start.launcher).collect();
            return Some(start);
        }
        let name = word.rsplit('/').next().unwrap_or(word);
        let is_module = i > 0 && matches!(words[i - 1].as_str(), "-m" | "--module");
        let is_script = name.ends_with(".py") || name == "run_train.sh";
        let is_launcher = LAUNCHERS.iter().any(|l| *l == word || *l == name);
        if (is_module || is_script) && !is_launcher {
            let helpers = [
                "preprocess_data.py",
                "setup.py",
                "convert.py",
                "json.tool",
                "pip",
                "venv",
            ];
            if helpers.contains(&name) {
                return None;
            }
            return Some(Start {
                line: command.line,
                launcher: words[..i].to_vec(),
                program: word.clone(),
                arguments: words[i + 1..].to_vec(),
            });
        }
    }
    None
}

/// Hosts and devices: of the launcher, else of Slurm.
fn world(file: &str, script: &Script, start: &Start) -> Result<World, JobError> {
    let number = |what: &str, text: Option<String>| -> Result<Option<u32>, JobError> {
        let Some(text) = text else { return Ok(None) };
        if let Some(gap) = shell::gap(&text) {
            let what = format!("{what} of the launcher");
            return Err(gap_error(
                file,
                Some(start.line),
                gap,
                script.gaps.get(gap),
                &what,
            ));
        }
        // `4:4` is a range of hosts, `h100:8` a kind of device with a number.
        let text = gpus(&text);
        let last = text.rsplit(':').next().unwrap_or_default();
        match last.parse::<u32>().ok().filter(|n| *n > 0) {
            Some(n) => Ok(Some(n)),
            // `gpu` and `auto` mean all devices of the host.
            None if ["gpu", "auto", "cuda"].contains(&last) => Ok(None),
            None => Err(error(
                file,
                Some(start.line),
                format!("{what} is `{text}`, expected a whole number from 1"),
                "correct it in the file",
            )),
        }
    };
    let sbatch: Vec<String> = script.sbatch.iter().flat_map(|(_, w)| w.clone()).collect();
    let of = |names: &[&str]| option(&start.launcher, names);
    let asked = |names: &[&str]| of(names).or_else(|| option(&sbatch, names));
    let hosts = match of(&["--nnodes", "--num_nodes", "--num-nodes", "--num_machines"]) {
        Some(text) => number("the number of hosts", Some(text))?,
        None => None,
    };
    let hosts = match hosts {
        Some(n) => Some(n),
        None => number("the number of hosts", asked(&["--nodes", "-N"]))?,
    };
    let per_host = of(&[
        "--nproc-per-node",
        "--nproc_per_node",
        "--num_gpus",
        "--num-gpus",
    ]);
    let per_host = number("the number of processes on a host", per_host)?;
    let of_slurm =
        asked(&["--gpus-per-node"]).or_else(|| asked(&["--gres"]).filter(|g| g.starts_with("gpu")));
    let per_host = match per_host {
        Some(n) => Some(n),
        None => number("the number of devices of a host", of_slurm)?,
    };
    let tasks = number(
        "the number of tasks on a host",
        asked(&["--ntasks-per-node"]),
    )?;
    let per_host = per_host.or(tasks.filter(|n| *n > 1));
    let all = asked(&["--gpus", "-G"]);
    let devices = match (hosts, per_host) {
        (Some(_), Some(_)) => None,
        _ => number("the number of devices", all)?,
    };
    // torchrun alone starts processes on its own host.
    let alone = start
        .launcher
        .iter()
        .any(|w| w == "--standalone" || w.ends_with("torchrun") || w == "deepspeed");
    let hosts = hosts.or((alone && per_host.is_some() && script.sbatch.is_empty()).then_some(1));
    Ok(World {
        hosts,
        per_host,
        devices,
    })
}

/// The number of GPUs in what Slurm is asked for, or the text: 8 of `gpu:h100:8,nvme:1`.
pub(crate) fn gpus(asked: &str) -> String {
    let mut all = asked.split(',');
    let own = all.clone().find(|one| one.starts_with("gpu:"));
    let one = own.or_else(|| all.next()).unwrap_or_default();
    one.rsplit(':').next().unwrap_or_default().to_string()
}
