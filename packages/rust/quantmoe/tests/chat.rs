mod common;

use std::collections::HashSet;
use std::fs;

use common::{all, folder, fresh, greedy, model, Copy, TURNS};
use quantmoe::{Chat, Error, Generator, Options, ReplyInfo, Sampling, TokenCache};

fn said(chat: &mut Chat, message: &str, options: Options) -> String {
    all(chat.reply(message, options).unwrap()).concat()
}

fn decoded(model: &Generator, ids: &[i64]) -> String {
    model.tokenizer().unwrap().decode(ids, false).unwrap()
}

#[test]
fn text_goes_on() {
    let model = model("plain");
    let mut chat = Chat::new(&model).unwrap();
    let ids = model.tokenizer().unwrap().encode("Then said the captain", true).unwrap();
    let expected = decoded(&model, &fresh(&model, &ids, 12));
    assert_eq!(said(&mut chat, "Then said the captain", greedy(12)), expected);
    assert_eq!(*chat.last(), ReplyInfo { prompt_tokens: ids.len(), kept_tokens: 0, tokens: 12, stopped: false });
}

#[test]
fn turns_are_one_prompt_of_all() {
    for name in ["plain", "hybrid"] {
        let copy = Copy::new(&folder(name), &TURNS);
        let model = Generator::open(&copy.0).unwrap();
        let mut chat = Chat::with_system(&model, "Be kind.").unwrap();
        let mut ids = Vec::new();
        for (before, message) in [("S: Be kind.\nQ: ", "Who are you?"), ("\nQ: ", "Whence?"), ("\nQ: ", "Why?")] {
            ids.extend(model.tokenizer().unwrap().encode(&format!("{before}{message}\nA:"), false).unwrap());
            let mut answer = fresh(&model, &ids, 8);
            answer.retain(|id| !model.stop_tokens().contains(id));
            assert_eq!(said(&mut chat, message, greedy(8)), decoded(&model, &answer));
            assert_eq!(chat.last().prompt_tokens, ids.len());
            assert!(before.starts_with('S') || chat.last().kept_tokens > 0);
            ids.extend(answer);
        }
    }
}

#[test]
fn an_answer_that_ends_within_a_character_goes_on() {
    let model = model("plain");
    let tokenizer = model.tokenizer().unwrap();
    let mut ids = tokenizer.encode("Then said", true).unwrap();
    let one = |seed| {
        let any = Sampling { temperature: 1000.0, top_k: 0, seed: Some(seed), ..Sampling::default() };
        Options { max_new_tokens: 1, sampling: Some(any), ..Options::default() }
    };
    let first = |seed| all(TokenCache::new(&model).unwrap().generate(&ids, &one(seed)).unwrap());
    let seed = (0..1000).find(|&seed| decoded(&model, &first(seed)) == "\u{FFFD}").unwrap();
    let answer = first(seed);
    let mut chat = Chat::new(&model).unwrap();
    assert_eq!(said(&mut chat, "Then said", one(seed)), "\u{FFFD}");
    ids.extend(answer);
    ids.extend(tokenizer.encode(" the captain", false).unwrap());
    assert_eq!(said(&mut chat, " the captain", greedy(8)), decoded(&model, &fresh(&model, &ids, 8)));
    assert_eq!(chat.last().prompt_tokens, ids.len());
}

/// A template that counts messages, strips them, and drops reasoning has no turns of plain text.
const TEMPLATE: &str = r#"{%- if messages[0].role == 'system' %}S{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
{{ loop.index }}. {{ m.content.strip() }}{{ eos_token }}{{ end_token }}{{ turn_token }}
    {%- else %}
{{ '\n' + m.content.split('</think>')[-1] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\nA:' }}{% endif %}"#;

#[test]
fn a_template_is_rendered_where_there_are_no_turns() {
    let copy = Copy::new(&folder("hybrid"), &[("no_chat", "the template counts messages")]);
    fs::write(copy.0.join("chat_template.jinja"), TEMPLATE).unwrap();
    let tokens = r#"{"eos_token": {"content": "<e>"}, "extra_special_tokens": {"end_token": "<n>"},
        "model_specific_special_tokens": {"turn_token": "<t>"}}"#;
    fs::write(copy.0.join("tokenizer_config.json"), tokens).unwrap();
    let model = Generator::open(&copy.0).unwrap();
    let mut chat = Chat::with_system(&model, "Be kind.").unwrap();
    let mut ids = Vec::new();
    for (text, message) in [
        ("SBe kind.1. Who [answer]?<e><n><t>\nA:", " Who [answer]? "),
        ("3. Whence?<e><n><t>\nA:", "Whence?"),
        ("5. Why?<e><n><t>\nA:", "Why?"),
    ] {
        ids.extend(model.tokenizer().unwrap().encode(text, false).unwrap());
        let mut answer = fresh(&model, &ids, 8);
        answer.retain(|id| !model.stop_tokens().contains(id));
        assert_eq!(said(&mut chat, message, greedy(8)), decoded(&model, &answer));
        assert_eq!(chat.last().prompt_tokens, ids.len());
        ids.extend(answer);
    }
    fs::write(copy.0.join("chat_template.jinja"), "{{ raise_exception('only ' ~ 'tools') }}").unwrap();
    let mut chat = Chat::new(&model).unwrap();
    let error = chat.reply("Why?", greedy(1)).err().unwrap();
    assert!(error.to_string().contains("chat_template.jinja: invalid operation: only tools"), "{error}");
    fs::write(copy.0.join("chat_template.jinja"), "{% for %}").unwrap();
    let error = Chat::new(&model).err().unwrap();
    assert!(error.to_string().contains("chat_template.jinja: syntax error"), "{error}");
}

#[test]
fn oldest_turns_are_dropped_where_the_context_is_full() {
    let copy = Copy::new(&folder("hybrid"), &[&TURNS[..], &[("context_length", "64")]].concat());
    let model = Generator::open(&copy.0).unwrap();
    let mut chat = Chat::with_system(&model, "Be kind.").unwrap();
    for _ in 0..8 {
        assert_ne!(said(&mut chat, "And then?", greedy(12)), "");
        assert!(chat.last().prompt_tokens + 12 <= 64);
    }
    let large = "Then said the captain of the host. ".repeat(20);
    let error = chat.reply(&large, greedy(12)).err().unwrap();
    assert!(error.to_string().contains("do not fit into the model's context of 64 tokens"), "{error}");
    assert_ne!(said(&mut chat, "And then?", greedy(12)), "");
}

#[test]
fn stop_strings_end_an_answer() {
    let model = model("plain");
    let text = said(&mut Chat::new(&model).unwrap(), "Then said the captain", greedy(24));
    let stop = &text[text.len() / 2..text.len() / 2 + 6];
    let mut chat = Chat::new(&model).unwrap();
    let options = Options { stop: vec!["never".into(), stop.into()], ..greedy(24) };
    assert_eq!(said(&mut chat, "Then said the captain", options), text[..text.find(stop).unwrap()]);
    assert!(chat.last().stopped);
}

#[test]
fn an_answer_that_is_cancelled_stays_and_the_chat_goes_on() {
    let model = model("hybrid");
    let mut chat = Chat::new(&model).unwrap();
    let options = greedy(1000);
    let cancel = options.cancel.clone();
    let mut text = String::new();
    let mut ended = None;
    for piece in chat.reply("Then said the captain", options).unwrap() {
        match piece {
            Ok(piece) => text += &piece,
            Err(error) => ended = Some(error),
        }
        if text.len() > 10 {
            cancel.cancel();
        }
    }
    assert!(matches!(ended, Some(Error::Cancelled)));
    assert_ne!(said(&mut chat, " And", greedy(4)), "");
    assert!(chat.last().kept_tokens > 0);
}

#[test]
fn a_conversation_moves_to_another_thread_during_an_answer() {
    let model = model("plain");
    let mut chat = Chat::new(&model).unwrap();
    let mut reply = chat.reply("Then said the captain", greedy(12)).unwrap();
    let begin = reply.next().unwrap().unwrap();
    let rest = std::thread::scope(|threads| {
        threads.spawn(move || reply.collect::<Result<String, Error>>().unwrap()).join().unwrap()
    });
    let whole = said(&mut Chat::new(&model).unwrap(), "Then said the captain", greedy(12));
    assert_eq!(begin + &rest, whole);
}

#[test]
fn close_refuses_later_messages_by_name() {
    let model = model("plain");
    let mut chat = Chat::new(&model).unwrap();
    let mut reply = chat.reply("Then said", greedy(100_000)).unwrap();
    assert!(reply.next().unwrap().is_ok());
    model.close();
    assert!(matches!(reply.find_map(Result::err), Some(Error::Closed)));
    assert!(matches!(chat.reply("Then said", greedy(4)).err(), Some(Error::Closed)));
}

#[test]
fn sampling_follows_its_seed_and_its_limits() {
    let model = model("plain");
    let own = model.sampling();
    assert_eq!((own.temperature, own.top_k, own.top_p), (0.8, 50, 0.95)); // generation_config.json
    let text = |sampling: Sampling| {
        let options = Options { max_new_tokens: 16, sampling: Some(sampling), ..Options::default() };
        said(&mut Chat::new(&model).unwrap(), "The old house", options)
    };
    let of = Sampling::default;
    let greedy = text(Sampling::greedy());
    assert_eq!(greedy, text(Sampling { top_k: 1, ..of() }));
    assert_eq!(greedy, text(Sampling { top_k: 0, top_p: 1e-9, ..of() }));
    assert_eq!(greedy, text(Sampling { top_k: 0, min_p: 1.0, ..of() }));
    assert_eq!(text(Sampling { seed: Some(7), ..of() }), text(Sampling { seed: Some(7), ..of() }));
    let texts: HashSet<String> = (0..8).map(|seed| text(Sampling { seed: Some(seed), ..of() })).collect();
    assert!(texts.len() > 4);
    assert_ne!(greedy, text(Sampling { repetition_penalty: 1e6, ..Sampling::greedy() }));
    assert_ne!(greedy, text(Sampling { presence_penalty: 1e6, ..Sampling::greedy() }));
    assert_ne!(greedy, text(Sampling { frequency_penalty: 1e6, ..Sampling::greedy() }));
}

#[test]
fn what_the_model_lacks_is_refused() {
    let error = Chat::with_system(&model("plain"), "Be kind.").err().unwrap();
    assert!(error.to_string().contains("takes no system prompt; put it into the first message"), "{error}");
    let copy = Copy::new(&folder("plain"), &[("no_chat", "the template counts messages")]);
    let model = Generator::open(&copy.0).unwrap();
    let error = Chat::new(&model).err().unwrap();
    assert!(error.to_string().contains("chat_template.jinja: is missing"), "{error}");
    fs::remove_file(copy.0.join("tokenizer.json")).unwrap();
    let error = Chat::raw(&Generator::open(&copy.0).unwrap()).err().unwrap();
    assert!(error.to_string().contains("tokenizer.json is missing"), "{error}");
    fs::write(copy.0.join("generation_config.json"), "{\"do_sample\": true, \"top_p\": 2}").unwrap();
    let error = Generator::open(&copy.0).err().unwrap();
    assert!(error.to_string().contains("generation_config.json: top_p is 2, expected"), "{error}");
}
