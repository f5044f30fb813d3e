mod common;

use std::thread;
use std::time::Duration;

use common::{all, fresh, greedy, model};
use quantmoe::{Cancel, Error, Generator, Options, Sampling, TokenCache};

const PROMPT: [i64; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

#[test]
fn an_answer_goes_on_from_its_last_token() {
    for name in ["plain", "hybrid"] {
        let model = model(name);
        let whole = fresh(&model, &PROMPT, 12);
        let mut cache = TokenCache::new(&model).unwrap();
        let first = all(cache.generate(&PROMPT, &greedy(5)).unwrap());
        let rest = all(cache.generate(&[], &greedy(7)).unwrap());
        assert_eq!([first, rest].concat(), whole);
        assert_eq!(cache.tokens(), [&PROMPT[..], &whole[..11]].concat());
    }
}

#[test]
fn a_folder_without_a_model_is_named() {
    let file = common::folder("plain").join("model.onnx");
    for (folder, named) in [("".into(), "\"\"".into()), (file.clone(), file.join("model.onnx").display().to_string())] {
        let error = Generator::open(&folder).err().unwrap();
        assert_eq!(error.to_string(), format!("{named}: missing; expected the folder of an exported model"));
    }
}

#[test]
fn long_prompts_and_growing_caches_give_the_same_tokens() {
    for name in ["plain", "hybrid"] {
        let model = model(name);
        let ids: Vec<i64> = (0..1300).map(|i| i * 7 % 4000 + 1).collect();
        let mut cache = TokenCache::new(&model).unwrap();
        all(cache.generate(&ids[..100], &greedy(1)).unwrap()); // smaller than the first capacity
        assert_eq!(cache.keep(&ids).unwrap(), 100);
        assert_eq!(all(cache.generate(&ids[100..], &greedy(3)).unwrap()), fresh(&model, &ids, 3));
    }
}

#[test]
fn keep_goes_back_to_the_end_of_a_prompt() {
    for name in ["plain", "hybrid"] {
        let model = model(name);
        let mut cache = TokenCache::going_back(&model).unwrap();
        all(cache.generate(&PROMPT, &greedy(6)).unwrap());
        // A hybrid model has copies of the states at the prompt's end and eight tokens before it.
        for (other, plain, hybrid) in [
            ([&PROMPT[..], &[20, 21]].concat(), 12, 12),
            (PROMPT.to_vec(), 11, 4),
            ([&PROMPT[..5], &[30]].concat(), 5, 4),
        ] {
            let kept = cache.keep(&other).unwrap();
            assert_eq!(kept, if name == "hybrid" { hybrid } else { plain });
            assert_eq!(all(cache.generate(&other[kept..], &greedy(6)).unwrap()), fresh(&model, &other, 6));
        }
    }
}

#[test]
fn cancelled_generation_leaves_a_cache_that_goes_on() {
    for name in ["plain", "hybrid"] {
        let model = model(name);
        let more: Vec<i64> = (0..300).map(|i| i * 11 % 4000 + 1).collect();
        let mut ended = 0;
        for i in 0..40 {
            let mut cache = TokenCache::new(&model).unwrap();
            all(cache.generate(&PROMPT, &greedy(2)).unwrap());
            let cancel = Cancel::default();
            let options = Options { cancel: cancel.clone(), ..greedy(4) };
            let canceller = thread::spawn(move || {
                thread::sleep(Duration::from_micros(i * 700));
                cancel.cancel();
            });
            match cache.generate(&more, &options).unwrap().collect::<Result<Vec<_>, _>>() {
                Ok(_) => {}
                Err(error) => {
                    assert!(matches!(error, Error::Cancelled), "{error}");
                    ended += 1;
                }
            }
            canceller.join().unwrap();
            // What was not read is read first.
            let expected = [cache.tokens(), &[][..]].concat();
            assert_eq!(cache.keep(&[&expected[..], &[50, 51]].concat()).unwrap(), expected.len());
            let found = all(cache.generate(&[50, 51], &greedy(4)).unwrap());
            assert_eq!(found, fresh(&model, &[&expected[..], &[50, 51]].concat(), 4));
        }
        assert_ne!(ended, 0);
    }
}

#[test]
fn a_cancelled_prompt_is_read_by_the_next_answer() {
    let model = model("hybrid");
    let mut cache = TokenCache::new(&model).unwrap();
    let options = greedy(4);
    options.cancel.cancel();
    assert!(matches!(cache.generate(&PROMPT, &options).unwrap().next(), Some(Err(Error::Cancelled))));
    let ids = [&PROMPT[..], &[50]].concat();
    assert_eq!(all(cache.generate(&[50], &greedy(4)).unwrap()), fresh(&model, &ids, 4));
}

#[test]
fn wrong_calls_are_refused_by_name() {
    let model = model("plain");
    let mut cache = TokenCache::new(&model).unwrap();
    let error = cache.generate(&[], &greedy(1)).err().unwrap();
    assert_eq!(error.to_string(), "the prompt has no tokens");
    let options = Options { sampling: Some(Sampling { top_p: 1.5, ..Sampling::default() }), ..Options::default() };
    let error = cache.generate(&PROMPT, &options).err().unwrap();
    assert_eq!(error.to_string(), "top_p is 1.5, expected a number above 0, at most 1");
}

#[test]
fn after_a_wrong_id_the_cache_goes_on() {
    let model = model("plain");
    let mut cache = TokenCache::new(&model).unwrap();
    for id in [-1, 4096] {
        let penalized =
            Options { sampling: Some(Sampling { repetition_penalty: 2.0, ..Sampling::default() }), ..greedy(1) };
        let error = cache.generate(&[1, id], &penalized).err().unwrap();
        assert!(matches!(error, Error::Argument(_)), "{error}");
        assert_eq!(error.to_string(), format!("token id {id} is outside the vocabulary, 0 to 4095"));
    }
    assert_eq!(all(cache.generate(&PROMPT, &greedy(3)).unwrap()), fresh(&model, &PROMPT, 3));
}

#[test]
fn close_during_generation_ends_it_by_name() {
    for name in ["plain", "hybrid"] {
        for i in 0..10 {
            let model = model(name);
            let mut cache = TokenCache::new(&model).unwrap();
            let answer = thread::spawn(move || {
                let error = match cache.generate(&PROMPT, &greedy(100_000)) {
                    Ok(mut tokens) => tokens.find_map(Result::err).expect("an answer that never ends"),
                    Err(error) => error, // closed before it began
                };
                (error, cache.keep(&PROMPT))
            });
            thread::sleep(Duration::from_millis(3 * i));
            model.close();
            let (error, later) = answer.join().unwrap();
            assert!(matches!(error, Error::Closed), "{error}");
            assert!(matches!(later, Err(Error::Closed)));
            assert!(matches!(TokenCache::new(&model).err(), Some(Error::Closed)));
            assert!(matches!(model.tokenizer().err(), Some(Error::Closed)));
            model.close();
        }
    }
}

#[test]
fn many_threads_share_a_model() {
    let model = model("plain");
    let expected = fresh(&model, &PROMPT, 20);
    let threads: Vec<_> = (0..8)
        .map(|_| {
            thread::spawn({
                let model = model.clone();
                move || fresh(&model, &PROMPT, 20)
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), expected);
    }
}
